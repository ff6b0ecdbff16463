"""Pipelines: stages of a stack that run side by side on parts of a batch."""
