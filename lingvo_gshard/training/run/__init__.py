"""A training run: the loop, its directory, its checkpoints, and all that watches and records it."""
