"""Compilations of the planner: in a process that can be stopped early, kept for later plans."""
