"""Gradients: what the backward pass saves, recomputes and computes by hand."""
