"""Checkpoints: saving, verifying, choosing and restoring the state."""
