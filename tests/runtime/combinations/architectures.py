"""What a layer, a task's head and a batch of a combination can be, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.norm import RMSNorm
from lingvo_gshard.wings.published_layers.latent_experts import LatentExperts
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention
from tests.layers.attention import attention_options


def _of_stack(params: Params) -> Params:
    """Returns an attention whose sizes are those of its stack."""
    return params.set(model_dim=0, num_heads=0)


def _grouped() -> Params:
    p = SelfAttention.params().set(num_key_value_heads=2, qk_norm=True, rotary_fraction=0.5)
    return p.set(head_dim=4, use_bias=True, use_output_bias=True, use_sinks=True)


def _published() -> Params:
    p = PublishedAttention.params().set(num_key_value_heads=2, head_dim=4, rotary_fraction=1.0)
    return p.set(has_value_weight=False, normalizes_values=True, has_output_gate=True)


def _windowed() -> Params:
    return SelfAttention.params().set(window=2, relative_buckets=8, relative_max_distance=5)


def _near() -> Params:
    return _of_stack(attention_options.compressed(compressed=0, index_heads=0))


# The self-attentions of consecutive layers, repeated.
ATTENTIONS: dict[str, Callable[[], tuple[Params, ...]]] = {
    "": lambda: (),
    "grouped": lambda: (_grouped(),),
    "published": lambda: (_published(),),
    "windowed": lambda: (_windowed(),),
    "latent": lambda: (_of_stack(attention_options.latent()),),
    "indexed": lambda: (_of_stack(attention_options.indexed()),),
    "compressed": lambda: (_near(), _of_stack(attention_options.compressed())),
    "delta_net": lambda: (_of_stack(attention_options.delta_net()), _grouped()),
    "kimi": lambda: (_of_stack(attention_options.kimi()),),
    "mamba": lambda: (_of_stack(attention_options.mamba()), _windowed()),
}

# Those that compute chunks in a loop, which no pipeline does, and all that only a decoder has.
IN_CHUNKS = ("delta_net", "kimi", "mamba")
CAUSAL = ("indexed", "compressed", *IN_CHUNKS)


def attentions_for(task: str, is_pipeline: bool) -> list[str]:
    """Returns the names of the attentions that a task with such stacks can have."""
    refused = CAUSAL if task == "translation" else IN_CHUNKS if is_pipeline else ()
    return [name for name in ATTENTIONS if name not in refused]


def _gated(stack: Params) -> None:
    stack.layer.feed_forward.set(activation="swiglu", use_bias=False)
    stack.moe.experts.set(activation="swiglu", use_bias=True)
    stack.layer.norm = RMSNorm.params()


def _shared(stack: Params) -> None:
    stack.moe.set(shared_hidden_dim=12, shared_combination="gated")


def _latent(stack: Params) -> None:
    stack.moe = LatentExperts.params().set(**dict(stack.moe.items()), latent_dim=8)


def _normed_twice(stack: Params) -> None:
    stack.layer.set(norm_position="both", residual_scale=0.5)
    stack.has_input_norm = True


def _first_dense(stack: Params) -> None:
    period = len(stack.attention_pattern) or 1
    stack.set(dense_first=1, sequential_first=period, num_layers=stack.num_layers + period)


# Changes the Params of a stack that has its other options.
LAYERS: dict[str, Callable[[Params], None]] = {
    "": lambda stack: None,
    "gated": _gated,
    "shared": _shared,
    "latent_experts": _latent,
    "normed_twice": _normed_twice,
    "first_dense": _first_dense,
}

# Options of a language model's task.
HEADS: dict[str, Mapping[str, object]] = {
    "": {},
    "untied": {"tie_softmax": False, "use_logit_bias": True},
    "smoothed": {"label_smoothing": 0.1, "z_loss_weight": 0.01},
    "capped": {"logit_cap": 3.0, "logit_scale": 0.5, "embedding_scale": 2.0},
    "future": {"future_tokens": 1},
    "unplaced": {"add_positions": False},
}

# Options of the trainer's services.
SERVICES: dict[str, Mapping[str, object]] = {
    "": {},
    "ratios": {"update_ratios_every": 1},
    "spikes": {"spikes.policy": "skip"},
    "reduced": {"reduce_dtype": "bfloat16"},
}


def places(
    rows: int, length: int, is_packed: bool, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32 segments [B,L] and positions [B,L] of rows that end at different places.

    A packed row has two segments. Positions count from 0 in each of them.
    """
    place_L = np.arange(length, dtype=np.int32)
    is_real_BL = place_L < rng.integers(length // 2, length + 1, rows)[:, None]
    second_B1 = rng.integers(1, length // 2, rows, np.int32)[:, None] if is_packed else length
    is_second_BL = place_L >= second_B1
    segments_BL = np.where(is_real_BL, np.int32(1) + is_second_BL, 0)
    positions_BL = np.where(is_second_BL, place_L - second_B1, place_L)
    return segments_BL, np.where(is_real_BL, positions_BL, 0)
