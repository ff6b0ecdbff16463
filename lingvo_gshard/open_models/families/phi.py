"""Phi-3, Phi-4 and Phi-4-mini (arXiv 2404.14219, 2412.08905), and Phi-3.5-MoE."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.moe.routers import SparseMixerRouter
from lingvo_gshard.layers.norm import LayerNorm
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    ATTENTION_BIASES,
    DECODER_DEFAULTS,
    EMBEDDINGS,
    FUSED_ATTENTION,
    FUSED_FEED_FORWARD,
    NORM_BIASES,
    NORMS,
    decoder_config,
    plain_task,
)
from lingvo_gshard.open_models.families.experts import (
    dropless_experts,
    expert_rows,
    loss_coefficient,
    loss_weight,
)
from lingvo_gshard.open_models.families.family import Family, sliding_window, window_config
from lingvo_gshard.open_models.families.rope import set_rope
from lingvo_gshard.open_models.table import TensorPattern

_LENGTH = "original_max_position_embeddings"
_DEFAULTS = DECODER_DEFAULTS | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    _LENGTH: 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "vocab_size": 32064,
}
_EXPERTS_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "hidden_size": 4096,
    "input_jitter_noise": 0.0,
    "intermediate_size": 6400,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.01,
    "sliding_window": None,
    "vocab_size": 32064,
}


def _common(config: PublishedConfig) -> Params:
    """Returns what Phi-3 and Phi-3.5-MoE share."""
    config.expect("hidden_act", "silu")
    task = plain_task(config)
    attention = task.decoder.layer.self_attention
    attention.window = sliding_window(config)
    rope = config.rope()
    # Names that LongRoPE had in older files.
    if rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    set_rope(config, attention, rope)
    return task


def _common_config(task: Params) -> dict[str, Any]:
    attention = task.decoder.layer.self_attention
    scaling = attention.rotary_scaling
    length = {_LENGTH: scaling.original_length} if "original_length" in scaling else {}
    return {**decoder_config(task), **length, "sliding_window": window_config((attention,))}


def _task(config: PublishedConfig) -> Params:
    task = _common(config)
    # No layer reads the second key.
    task.decoder.residual_dropout_rate = config.get("resid_pdrop", 0.0)
    config.get("embd_pdrop", None)
    # Also without a scaling, a file may have it.
    config.get(_LENGTH, None)
    return task


def _config(task: Params) -> dict[str, Any]:
    return {**_common_config(task), "resid_pdrop": task.decoder.residual_dropout_rate}


def _experts_task(config: PublishedConfig) -> Params:
    task = _common(config)
    config.get(_LENGTH, None)
    decoder, has_bias = task.decoder, config.get("attention_bias", False)
    decoder.layer.norm = LayerNorm.params().set(epsilon=decoder.layer.norm.epsilon)
    decoder.layer.self_attention.set(use_bias=has_bias, use_output_bias=has_bias)
    decoder.moe_every = 1
    k = config.expect("num_experts_per_tok", 2)
    router = SparseMixerRouter.params().set(
        jitter=config.get("input_jitter_noise", 0.0),
        threshold=2 * config.get("router_jitter_noise", kind=float),
        auxiliary_loss_weight=loss_weight(config.get("router_aux_loss_coef", 0.001), decoder, k),
    )
    decoder.moe = dropless_experts(
        router, config.get("num_local_experts"), config.get("intermediate_size")
    )
    return task.set(use_logit_bias=config.get("lm_head_bias", False))


def _experts_config(task: Params) -> dict[str, Any]:
    moe, router = task.decoder.moe, task.decoder.moe.router
    return {
        **_common_config(task),
        "attention_bias": task.decoder.layer.self_attention.use_bias,
        "intermediate_size": moe.hidden_dim,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": 2,
        "input_jitter_noise": router.jitter,
        "router_jitter_noise": router.threshold / 2,
        "router_aux_loss_coef": loss_coefficient(router.auxiliary_loss_weight, task.decoder, 2),
        "lm_head_bias": task.use_logit_bias,
    }


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    table=(*EMBEDDINGS, *FUSED_ATTENTION, *NORMS, *FUSED_FEED_FORWARD),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
)
PHIMOE = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    table=(
        *EMBEDDINGS,
        TensorPattern("lm_head.bias", "logit_bias", "V->V"),
        *ATTENTION,
        *ATTENTION_BIASES,
        *NORMS,
        *NORM_BIASES,
        *expert_rows("block_sparse_moe", names=("w1", "w3", "w2")),
    ),
    read_task=_experts_task,
    config_of=_experts_config,
    defaults=_EXPERTS_DEFAULTS,
    aliases={"num_experts": "num_local_experts"},
)
