"""Programs in files, which run where only jax is installed."""
