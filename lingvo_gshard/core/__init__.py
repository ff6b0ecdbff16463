"""Foundations of layers: Params, NestedMap, Layer, Context and the registry of experiments."""
