"""Configuration: Params, gin over Params, and the registry of experiments."""
