"""Optimizers, learning-rate schedules and the moments they keep."""
