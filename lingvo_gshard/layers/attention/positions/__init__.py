"""Positions in attention: rotations of queries and keys, and learned biases."""
