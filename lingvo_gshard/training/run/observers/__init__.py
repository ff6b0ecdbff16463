"""Observers, which watch a run step by step."""
