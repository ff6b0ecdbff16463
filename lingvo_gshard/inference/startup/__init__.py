"""Weights and compiled programs on disk, for the second start of a decoder."""
