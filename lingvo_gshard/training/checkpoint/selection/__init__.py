"""Which checkpoints of a run are kept, and which is read."""
