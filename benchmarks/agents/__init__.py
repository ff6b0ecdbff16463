"""Agents of many hosts under simulated clocks, at a simulated meeting place."""
