"""How learning rates move with the width of a model."""
