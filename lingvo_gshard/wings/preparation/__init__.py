"""Prepares raw text for training: by many processes, restartable, the same bytes every time."""
