"""The quality that precisions and optimizers reach."""
