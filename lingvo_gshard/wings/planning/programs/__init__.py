"""Plans programs that this process did not lower: saved programs, and jax's exported functions."""
