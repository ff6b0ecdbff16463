"""Attention: kernels, masks and positions."""
