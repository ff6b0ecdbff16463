"""Low precision: training with products of 8 bits."""
