"""Compares plans of the GShard paper's experiments with the published figures."""
