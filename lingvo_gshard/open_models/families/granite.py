"""Granite 3, dense and with experts (https://github.com/ibm-granite/granite-3.0-language-models)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    ATTENTION_BIASES,
    DECODER_DEFAULTS,
    EMBEDDINGS,
    FEED_FORWARD,
    FEED_FORWARD_BIASES,
    NORMS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.open_models.families.experts import local_experts, local_experts_config
from lingvo_gshard.open_models.families.family import Family
from lingvo_gshard.open_models.table import Table, TensorPattern

_ROWS = (*EMBEDDINGS, *ATTENTION, *ATTENTION_BIASES, *NORMS)
_LAYER, _OURS = "model.layers.{layer}", "decoder.{layer}.feed_forward"


def _fused_rows(block: str, ours: str, experts: str = "") -> Table:
    """Returns the rows of a feed-forward layer whose gate and factor are one tensor.

    Args:
      block: what comes before the published names.
      ours: what comes before our names.
      experts: the letter of the experts; empty for a layer without experts.
    """
    return (
        *(
            TensorPattern(
                f"{_LAYER}.{block}.input_linear.weight",
                f"{_OURS}.{ours}.w_{name}",
                f"{experts}HM->{experts}MH",
                joined="H",
            )
            for name in ("in", "factor")
        ),
        TensorPattern(
            f"{_LAYER}.{block}.output_linear.weight",
            f"{_OURS}.{ours}.w_out",
            f"{experts}MH->{experts}HM",
        ),
    )


_EXPERTS = (
    TensorPattern(
        f"{_LAYER}.block_sparse_moe.router.layer.weight", f"{_OURS}.router.w_gate", "EM->ME"
    ),
    *_fused_rows("block_sparse_moe", "experts", "E"),
)
_MULTIPLIERS = dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0
)
_COMMON_DEFAULTS = (
    DECODER_DEFAULTS
    | _MULTIPLIERS
    | {
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    }
)
_DEFAULTS = _COMMON_DEFAULTS | {"mlp_bias": False}
_EXPERTS_DEFAULTS = _COMMON_DEFAULTS | {
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "router_aux_loss_coef": 0.001,
}
_SHARED_DEFAULTS = _EXPERTS_DEFAULTS | {"shared_intermediate_size": 0}


def _common(config: PublishedConfig) -> Params:
    """Returns what all models share: a decoder whose parts have constant factors."""
    task = decoder_task(config)
    layer, has_bias = task.decoder.layer, config.get("attention_bias", False)
    factors = {name: config.get(name, 1.0, float) for name in _MULTIPLIERS}
    for name, factor in factors.items():
        if factor <= 0:
            raise UserError(f"{config.where}: {name} is {factor}; a number above 0 was expected")
    layer.self_attention.set(
        use_bias=has_bias,
        use_output_bias=has_bias,
        query_scale=float(factors["attention_multiplier"]),
    )
    layer.residual_scale = float(factors["residual_multiplier"])
    return task.set(
        embedding_scale=float(factors["embedding_multiplier"]),
        logit_scale=1.0 / factors["logits_scaling"],
    )


def _common_config(task: Params) -> dict[str, Any]:
    layer = task.decoder.layer
    attention = layer.self_attention
    scale = attention.query_scale or (attention.head_dim or task.model_dim) ** -0.5
    return {
        **decoder_config(task),
        "attention_bias": attention.use_bias,
        "attention_multiplier": scale,
        "embedding_multiplier": task.embedding_scale or task.model_dim**0.5,
        # Without the digits that rounding adds.
        "logits_scaling": float(f"{1.0 / task.logit_scale:.12g}"),
        "residual_multiplier": layer.residual_scale,
    }


def _task(config: PublishedConfig) -> Params:
    task = _common(config)
    task.decoder.layer.feed_forward.use_bias = config.get("mlp_bias", False)
    return task


def _config(task: Params) -> dict[str, Any]:
    return {**_common_config(task), "mlp_bias": task.decoder.layer.feed_forward.use_bias}


def _experts_task(config: PublishedConfig) -> Params:
    task = _common(config)
    task.decoder.moe_every = 1
    task.decoder.moe = local_experts(config, task.decoder)
    return task


def _experts_config(task: Params) -> dict[str, Any]:
    return {
        **_common_config(task),
        **local_experts_config(task.decoder),
    }


def _shared_task(config: PublishedConfig) -> Params:
    task = _experts_task(config)
    task.decoder.moe.shared_hidden_dim = config.get("shared_intermediate_size", 0)
    return task


def _shared_config(task: Params) -> dict[str, Any]:
    shared = task.decoder.moe.shared_hidden_dim
    return {**_experts_config(task), "shared_intermediate_size": shared}


DENSE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    table=(*_ROWS, *FEED_FORWARD, *FEED_FORWARD_BIASES),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
)
EXPERTS = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    table=(*_ROWS, *_EXPERTS),
    read_task=_experts_task,
    config_of=_experts_config,
    defaults=_EXPERTS_DEFAULTS,
)
SHARED = Family(
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    table=(*_ROWS, *_EXPERTS, *_fused_rows("shared_mlp", "shared")),
    read_task=_shared_task,
    config_of=_shared_config,
    defaults=_SHARED_DEFAULTS,
)
