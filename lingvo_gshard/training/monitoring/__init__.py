"""Metrics, progress, expert loads, and the diagnosis of losses that are not finite."""
