"""Facts of models that are computed from their Params: operations and active weights."""
