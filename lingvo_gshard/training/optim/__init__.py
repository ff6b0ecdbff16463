"""Optimizers, learning-rate schedules and weight groups."""
