"""Plans programs that this process did not lower: saved ones, and those of jax."""
