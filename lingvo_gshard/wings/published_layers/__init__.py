"""Layers that only published models need, made as a user makes layers of their own."""
