"""What a layer is: Params, NestedMap, Layer, Context and the registry of experiments."""
