"""A training run: the training loop, its log directory, checkpoints, monitoring and records."""
