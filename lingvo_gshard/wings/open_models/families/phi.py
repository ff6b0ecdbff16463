"""Phi-3, Phi-4 and Phi-4-mini (arXiv 2404.14219, 2412.08905), and Phi-3.5-MoE."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.norm import LayerNorm
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    EMBEDDINGS,
    FUSED_ATTENTION,
    NORM_BIASES,
    NORMS,
    decoder_config,
    fused_rows,
    plain_task,
)
from lingvo_gshard.wings.open_models.families.experts import LOCAL_EXPERTS, MIXTRAL_EXPERTS
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    Family,
    Setting,
    sliding_window,
    windows_config,
)
from lingvo_gshard.wings.open_models.families.rope import set_rope
from lingvo_gshard.wings.open_models.table import TensorPattern
from lingvo_gshard.wings.published_layers.routers import SparseMixerRouter

_LENGTH = "original_max_position_embeddings"
_DEFAULTS = DECODER_DEFAULTS | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    _LENGTH: 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "vocab_size": 32064,
}
_EXPERTS_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "input_jitter_noise": 0.0,
    "intermediate_size": 6400,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.01,
    "sliding_window": None,
    "vocab_size": 32064,
}
_FEED_FORWARD = fused_rows("mlp.gate_up_proj.weight", "mlp.down_proj.weight")
_DROPOUT = Setting("resid_pdrop", ("decoder.residual_dropout_rate",), 0.0)
_EXPERTS_SETTINGS = (BIASES, Setting("lm_head_bias", ("use_logit_bias",), False))


def _common(config: PublishedConfig, *settings: Setting) -> Params:
    """Returns what Phi-3 and Phi-3.5-MoE share."""
    # Also without a scaling, a file may have it.
    config.get(_LENGTH, None)
    config.expect("hidden_act", "silu")
    task = plain_task(config, *settings)
    attention = task.decoder.layer.self_attention
    attention.window = sliding_window(config)
    rope = config.rope()
    # Names that LongRoPE had in older files.
    if rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    set_rope(config, attention, rope)
    return task


def _common_config(task: Params, *settings: Setting) -> dict[str, Any]:
    attention = task.decoder.layer.self_attention
    scaling = attention.rotary_scaling
    length = {_LENGTH: scaling.original_length} if "original_length" in scaling else {}
    window = windows_config(task.decoder)["sliding_window"]
    return {**decoder_config(task, *settings), **length, "sliding_window": window}


def _task(config: PublishedConfig) -> Params:
    # No layer reads it.
    config.get("embd_pdrop", None)
    return _common(config, _DROPOUT)


def _config(task: Params) -> dict[str, Any]:
    return _common_config(task, _DROPOUT)


def _experts_task(config: PublishedConfig) -> Params:
    task = _common(config, *_EXPERTS_SETTINGS)
    decoder = task.decoder
    decoder.layer.norm = LayerNorm.params().set(epsilon=decoder.layer.norm.epsilon)
    router = SparseMixerRouter.params().set(
        jitter=config.get("input_jitter_noise", 0.0),
        threshold=2 * config.get("router_jitter_noise", kind=float),
    )
    LOCAL_EXPERTS.read(config, decoder, router)
    return task


def _experts_config(task: Params) -> dict[str, Any]:
    router = task.decoder.moe.router
    return {
        **_common_config(task, *_EXPERTS_SETTINGS),
        **LOCAL_EXPERTS.config(task.decoder),
        "input_jitter_noise": router.jitter,
        "router_jitter_noise": router.threshold / 2,
    }


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    table=(*EMBEDDINGS, *FUSED_ATTENTION, *NORMS, *_FEED_FORWARD),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
)
PHIMOE = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    table=(
        *DECODER,
        TensorPattern("lm_head.bias", "logit_bias", "V->V"),
        *NORM_BIASES,
        *MIXTRAL_EXPERTS,
    ),
    read_task=_experts_task,
    config_of=_experts_config,
    defaults=_EXPERTS_DEFAULTS,
    aliases={"num_experts": "num_local_experts"},
)
