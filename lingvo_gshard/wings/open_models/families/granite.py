"""Granite 3, dense and with experts (https://github.com/ibm-granite/granite-3.0-language-models)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import LOCAL_EXPERTS
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FEED_FORWARD_BIAS,
    Part,
    above_zero,
    setting,
)

_MULTIPLIERS = dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0
)


def _read_factors(config: PublishedConfig, task: Params) -> None:
    """Gives the parts of a decoder their constant factors."""
    layer = task.decoder.layer
    factors = {name: above_zero(config, name, null=1.0) for name in _MULTIPLIERS}
    layer.self_attention.query_scale = factors["attention_multiplier"]
    layer.residual_scale = factors["residual_multiplier"]
    task.set(
        embedding_scale=factors["embedding_multiplier"],
        logit_scale=1.0 / factors["logits_scaling"],
    )


def _factors_config(task: Params) -> dict[str, Any]:
    layer = task.decoder.layer
    attention = layer.self_attention
    scale = attention.query_scale or (attention.head_dim or task.model_dim) ** -0.5
    return {
        "attention_multiplier": scale,
        "embedding_multiplier": task.embedding_scale or task.model_dim**0.5,
        # Without the digits that rounding adds.
        "logits_scaling": float(f"{1.0 / task.logit_scale:.12g}"),
        "residual_multiplier": layer.residual_scale,
    }


_PARTS = (*USUAL, BIASES, Part(_read_factors, _factors_config))
DENSE = decoder("granite", (*_PARTS, FEED_FORWARD_BIAS))
EXPERTS = decoder("granitemoe", (*_PARTS, LOCAL_EXPERTS))
SHARED = decoder(
    "granitemoeshared",
    (
        *_PARTS,
        LOCAL_EXPERTS,
        setting("shared_intermediate_size", "decoder.moe.shared_hidden_dim", null=0),
    ),
)
