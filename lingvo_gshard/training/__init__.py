"""Trains a model: optimizers, schedules, the training step, checkpoints, metrics and the loop."""
