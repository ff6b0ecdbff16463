"""The effects of precisions and optimizers on quality."""
