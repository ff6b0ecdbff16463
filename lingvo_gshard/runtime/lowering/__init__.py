"""Lowers TensorFlow functions to programs."""
