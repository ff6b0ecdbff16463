"""Training: optimizers, schedules, the train step, checkpoints, metrics and the loop."""
