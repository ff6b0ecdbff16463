"""Experts in inference: they compute all tokens that chose them, and only these are read."""
