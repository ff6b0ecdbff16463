"""How attention knows positions: rotations of queries and keys, and learned biases."""
