"""Qwen2 and Qwen3, dense and with experts (arXiv 2407.10671, 2505.09388, section 2)."""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.wings.open_models.families.experts import ExpertKeys, expert_rows
from lingvo_gshard.wings.open_models.families.family import BIASES, FULL, Family, Setting

_KEYS = ExpertKeys(normalize="norm_topk_prob")
_QWEN2_DEFAULTS = DECODER_DEFAULTS | {
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_DEFAULTS = _QWEN2_DEFAULTS | {"attention_bias": False, "head_dim": 128}
_EXPERTS_DEFAULTS = _QWEN2_DEFAULTS | {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "router_aux_loss_coef": 0.001,
}


def _task(config: PublishedConfig) -> Params:
    task = without_windows(config, BIASES)
    config.expect("use_qk_norm", True)
    layer = task.decoder.layer
    layer.self_attention.qk_norm = True
    layer.self_attention.query_key_norm.epsilon = layer.norm.epsilon
    return task


def _qwen2_task(config: PublishedConfig) -> Params:
    task = without_windows(config)
    task.decoder.layer.self_attention.use_bias = True
    return task


def _mimo_task(config: PublishedConfig) -> Params:
    config.expect("attention_bias", True)
    config.get("num_nextn_predict_layers", None)
    return _qwen2_task(config)


def without_windows(config: PublishedConfig, *settings: Setting) -> Params:
    """Returns `decoder_task` for a config that may, but must not, ask for sliding windows."""
    config.expect("use_sliding_window", False)
    for name in ("sliding_window", "max_window_layers"):
        # They have no meaning without use_sliding_window.
        config.get(name, None)
    for kind in config.get("layer_types", [], list):
        if kind != FULL:
            raise UserError(
                f"{config.where}: layer_types has {kind!r}, which is not supported without "
                f"use_sliding_window; {FULL!r} was expected"
            )
    return decoder_task(config, *settings)


def _moe_task(config: PublishedConfig) -> Params:
    config.expect("decoder_sparse_step", 1)
    config.expect("mlp_only_layers", [])
    task = _task(config)
    _KEYS.read(config, task.decoder)
    return task


def _config(task: Params) -> dict[str, Any]:
    return {**decoder_config(task, BIASES), "use_sliding_window": False}


def _qwen2_config(task: Params) -> dict[str, Any]:
    return {**decoder_config(task), "use_sliding_window": False}


def _moe_config(task: Params) -> dict[str, Any]:
    return {
        **_config(task),
        **_KEYS.config(task.decoder),
        "intermediate_size": task.decoder.hidden_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    table=DECODER,
    read_task=_qwen2_task,
    config_of=_qwen2_config,
    defaults=_QWEN2_DEFAULTS,
)
# MiMo (arXiv 2505.07608) computes what Qwen2 does, and has layers that predict further tokens.
MIMO = dataclasses.replace(
    QWEN2,
    model_type="mimo",
    architecture="MiMoForCausalLM",
    read_task=_mimo_task,
    read_left_out=lambda config: ("model.mtp_layers.",),
)
DENSE = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    table=DECODER,
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
)
EXPERTS = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    table=(*DECODER, *expert_rows("mlp")),
    read_task=_moe_task,
    config_of=_moe_config,
    defaults=_EXPERTS_DEFAULTS,
    aliases={"num_local_experts": "num_experts"},
)
