"""Layers in inference: functions that are registered for a layer's class. See faces.py."""

from lingvo_gshard.wings.inference.layers import (
    attention,
    moe,
    stored,
    transformer,
)
from lingvo_gshard.wings.inference.layers.faces import (
    cache_shapes,
    decoding_weights,
    extend,
    infer,
    state_shapes,
)

__all__ = [
    "attention",
    "cache_shapes",
    "decoding_weights",
    "extend",
    "infer",
    "moe",
    "state_shapes",
    "stored",
    "transformer",
]
