"""Runtimes: where a step runs, and who holds its state."""
