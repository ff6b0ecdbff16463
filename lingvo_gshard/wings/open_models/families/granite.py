"""Granite 3 and 4, dense and with experts; Granite 4 has Mamba-2 between its attentions.

https://github.com/ibm-granite/granite-3.0-language-models and
https://github.com/ibm-granite/granite-4.0-language-models.
"""

from __future__ import annotations

import math
from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import LOCAL_EXPERTS
from lingvo_gshard.wings.open_models.families.hybrids.mamba import (
    first_mamba,
    mamba_config,
    read_mamba,
)
from lingvo_gshard.wings.open_models.families.rope import ROPE
from lingvo_gshard.wings.published_layers.mamba import Mamba2

_MULTIPLIERS = dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0
)


def _read_factors(config: PublishedConfig, task: Params) -> None:
    """Gives the parts of a decoder their constant factors."""
    layer = task.decoder.layer
    factors = {name: family.above_zero(config, name, null=1.0) for name in _MULTIPLIERS}
    layer.self_attention.query_scale = factors["attention_multiplier"]
    layer.residual_scale = factors["residual_multiplier"]
    task.set(
        embedding_scale=factors["embedding_multiplier"], logit_scale=1.0 / factors["logits_scaling"]
    )


def _factors_config(task: Params) -> dict[str, Any]:
    attention = family.rotating(task.decoder)
    scale = 1.0
    if "query_scale" in attention:
        scale = attention.query_scale or (attention.head_dim or task.model_dim) ** -0.5
    return {
        "attention_multiplier": scale,
        "embedding_multiplier": task.embedding_scale or task.model_dim**0.5,
        # Without the digits that rounding adds.
        "logits_scaling": float(f"{1.0 / task.logit_scale:.12g}"),
        "residual_multiplier": task.decoder.layer.residual_scale,
    }


# Hyperparameter of Mamba-2 -> its key.
_MAMBA = {
    "num_groups": "mamba_n_groups",
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_state",
    "convolution_width": "mamba_d_conv",
    "use_convolution_bias": "mamba_conv_bias",
}


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer."""
    return family.types_of_layers(config, [family.LINEAR] * config.get("num_hidden_layers"))


def _read_positions(config: PublishedConfig, task: Params) -> None:
    """Sets the rotary positions of attentions, which have them only if the config says so."""
    if config.get("position_embedding_type", "", str) == "rope":
        ROPE.read(config, task)
    else:
        task.decoder.layer.self_attention.rotary_fraction = 0.0


def _positions_config(task: Params) -> dict[str, Any]:
    attention = family.rotating(task.decoder)
    if "rotary_fraction" in attention and attention.rotary_fraction:
        return ROPE.values(task) | {"position_embedding_type": "rope"}
    return {"position_embedding_type": "nope"}


def _layers(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the attention, and of Mamba-2."""
    heads = config.get("mamba_n_heads")
    inner = config.get("mamba_expand") * config.get("hidden_size")
    if inner % heads:
        raise UserError(
            f"{config.where}: mamba_n_heads is {heads}; a divisor of mamba_expand * hidden_size = "
            f"{inner} was expected"
        )
    config.expect("mamba_d_head", "auto", inner // heads)
    config.expect("mamba_proj_bias", False)
    least, most = config.get("time_step_limit", None, list) or [0.0, None]
    # transformers 5 writes infinity as an object.
    if isinstance(most, float) and math.isfinite(most):
        config.expect("time_step_limit", [least, None])
    mamba = read_mamba(config, _MAMBA, "rms_norm_eps")
    return {
        family.FULL: attention,
        family.LINEAR: mamba.set(value_dim=inner // heads, least_step=least),
    }


def _layers_config(task: Params) -> dict[str, Any]:
    layers = family.attention_of_layers(task.decoder)
    found: dict[str, Any] = {
        "layer_types": [family.LINEAR if each.cls is Mamba2 else family.FULL for each in layers]
    }
    if mamba := first_mamba(task.decoder):
        inner = mamba.num_groups * mamba.num_heads * mamba.value_dim
        found |= mamba_config(mamba, _MAMBA) | {
            "mamba_d_head": mamba.value_dim,
            "mamba_expand": inner // task.model_dim,
            "time_step_limit": [mamba.least_step, None],
        }
    return found


def _read_experts(config: PublishedConfig, task: Params) -> None:
    """Reads a shared expert beside others, or a feed-forward layer in its place."""
    hidden = config.get("shared_intermediate_size")
    if config.get("num_local_experts", 8, int) > 0:
        LOCAL_EXPERTS.read(config, task)
        task.decoder.moe.shared_hidden_dim = hidden
    else:
        task.decoder.hidden_dim = hidden


def _experts_config(task: Params) -> dict[str, Any]:
    if not task.decoder.moe_every:
        return {"num_local_experts": 0, "shared_intermediate_size": task.decoder.hidden_dim}
    shared = {"shared_intermediate_size": task.decoder.moe.shared_hidden_dim}
    return LOCAL_EXPERTS.values(task) | shared


def _multiply_logits(config: PublishedConfig, task: Params) -> None:
    """Reads norms of outputs. `logits_scaling` multiplies the logits; Granite divides by it."""
    task.logit_scale = 1.0 / task.logit_scale
    attention = task.decoder.layer.self_attention
    if not config.is_given("attention_multiplier"):
        attention.query_scale = attention.head_dim**-0.5
    if config.get("use_post_norm", False):
        task.decoder.layer.norm_position = "both"


def _multiplied_config(task: Params) -> dict[str, Any]:
    has_norms = task.decoder.layer.norm_position == "both"
    return {"logits_scaling": task.logit_scale, "use_post_norm": has_norms}


_FACTORS = family.Part(_read_factors, _factors_config)
_PARTS = (*USUAL, family.BIASES, _FACTORS)
DENSE = decoder("granite", (*_PARTS, family.FEED_FORWARD_BIAS))
# HyperCLOVA X SEED Think.
HYPERCLOVA = decoder(
    "hyperclovax",
    (*_PARTS, family.FEED_FORWARD_BIAS, family.Part(_multiply_logits, _multiplied_config)),
)
EXPERTS = decoder("granitemoe", (*_PARTS, LOCAL_EXPERTS))
SHARED = decoder(
    "granitemoeshared",
    (
        *_PARTS,
        LOCAL_EXPERTS,
        family.setting("shared_intermediate_size", "decoder.moe.shared_hidden_dim", null=0),
    ),
)
HYBRID = decoder(
    "granitemoehybrid",
    (
        family.SILU,
        family.Part(_read_positions, _positions_config),
        family.BIASES,
        _FACTORS,
        family.Part(_read_experts, _experts_config),
        family.layered(_kinds, _layers, _layers_config),
    ),
)
