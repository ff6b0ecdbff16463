"""Transformer layers and the ways a stack of layers is executed."""
