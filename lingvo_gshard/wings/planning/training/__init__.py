"""The whole training: failures, checkpoints, days and price."""
