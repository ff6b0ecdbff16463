"""Checkpoints: saving, verifying and restoring the state of a run."""
