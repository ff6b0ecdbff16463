"""Compares learning rates over the widths of a model."""
