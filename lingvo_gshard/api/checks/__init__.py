"""Checks of a run that was recorded."""
