"""Mistral: dense decoders with a sliding window (arXiv 2310.06825, section 2)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    DECODER_DEFAULTS,
    EMBEDDINGS,
    FEED_FORWARD,
    NORMS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.open_models.families.experts import (
    expert_rows,
    local_experts,
    local_experts_config,
)
from lingvo_gshard.open_models.families.family import Family, sliding_window, window_config

_DEFAULTS = DECODER_DEFAULTS | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
_EXPERTS_DEFAULTS = _DEFAULTS | {
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "sliding_window": None,
}


def sliding_task(config: PublishedConfig) -> Params:
    """Returns `decoder_task` with the sliding window of Mistral's and Mixtral's configs."""
    task = decoder_task(config)
    task.decoder.layer.self_attention.window = sliding_window(config)
    return task


def sliding_config(task: Params) -> dict[str, Any]:
    """Returns what `sliding_task` reads, from the Params of a task."""
    window = window_config((task.decoder.layer.self_attention,))
    return {**decoder_config(task), "sliding_window": window}


DENSE = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    table=(*EMBEDDINGS, *ATTENTION, *NORMS, *FEED_FORWARD),
    read_task=sliding_task,
    config_of=sliding_config,
    defaults=_DEFAULTS,
)


def _task(config: PublishedConfig) -> Params:
    task = sliding_task(config)
    task.decoder.moe_every = 1
    task.decoder.moe = local_experts(config, task.decoder)
    task.decoder.moe.router.jitter = config.get("router_jitter_noise", 0.0)
    return task


def _config(task: Params) -> dict[str, Any]:
    moe = task.decoder.moe
    return {
        **sliding_config(task),
        **local_experts_config(task.decoder),
        "router_jitter_noise": moe.router.jitter,
    }


EXPERTS = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    table=(
        *EMBEDDINGS,
        *ATTENTION,
        *NORMS,
        *expert_rows("block_sparse_moe", names=("w1", "w3", "w2")),
    ),
    read_task=_task,
    config_of=_config,
    defaults=_EXPERTS_DEFAULTS,
    aliases={"num_experts": "num_local_experts"},
)
