"""Params of attentions with options, each alone and all together, for the tests of them."""

import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.attention import MultiHeadAttention

EACH: dict[str, dict] = {
    "grouped": {"num_key_value_heads": 2},
    "multi_query": {"num_key_value_heads": 1},
    "qk_norm": {"qk_norm": True},
    "rotary": {"rotary_fraction": 1.0},
    "part_rotary": {"rotary_fraction": 0.5, "rotary_base": 50.0},
    "relative": {"relative_buckets": 8, "relative_max_distance": 5},
    "window": {"window": 2},
    "cap": {"logit_cap": 0.7},
    "together": {
        "num_key_value_heads": 2,
        "qk_norm": True,
        "rotary_fraction": 0.5,
        "relative_buckets": 8,
        "relative_max_distance": 5,
        "window": 5,
        "logit_cap": 0.5,
    },
}


def plain(**values: object) -> Params:
    """Returns the Params of an attention of 2 heads, M = 8, with these values."""
    return MultiHeadAttention.params().set(model_dim=8, num_heads=2, **values)


def attention(name: str, **values: object) -> Params:
    """Returns the Params of an attention of 4 heads of 8, M = 8, with the options of that name."""
    p = MultiHeadAttention.params().set(model_dim=8, num_heads=4, head_dim=8, **EACH[name])
    return p.set(**values)


def blocks() -> Params:
    """Returns the Params of a causal attention in blocks with what else these can do."""
    p = attention("together", relative_buckets=0, block_size=4, is_causal=True)
    return p.set(logit_cap=2.0, window=3)


def ring() -> Params:
    """Returns the Params of `blocks` with keys that go around."""
    return blocks().set(key_exchange="ring", block_size=2)


def in_blocks(layer: MultiHeadAttention, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    """Returns the output of an attention in blocks or a ring on the conformance inputs."""
    segments = inputs.target_segments
    return layer.fprop(theta, inputs.x, inputs.x, segments, segments)
