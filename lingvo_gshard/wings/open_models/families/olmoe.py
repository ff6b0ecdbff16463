"""OLMoE: experts in all layers, and norms of queries and keys over all heads (arXiv 2409.02060)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    decoder_config,
    decoder_task,
    set_heads_norm,
)
from lingvo_gshard.wings.open_models.families.experts import ExpertKeys, expert_rows
from lingvo_gshard.wings.open_models.families.family import Family

_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "rms_norm_eps": 1e-5,
    "router_aux_loss_coef": 0.01,
    "vocab_size": 50304,
}
_KEYS = ExpertKeys(hidden="intermediate_size", normalize="norm_topk_prob", coefficient=0.01)


def _task(config: PublishedConfig) -> Params:
    config.expect("attention_bias", False)
    config.expect("clip_qkv", None)
    task = decoder_task(config)
    set_heads_norm(task)
    _KEYS.read(config, task.decoder)
    return task


def _config(task: Params) -> dict[str, Any]:
    return {**decoder_config(task), "attention_bias": False, **_KEYS.config(task.decoder)}


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    table=(*DECODER, *expert_rows("mlp")),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
    aliases={"num_local_experts": "num_experts"},
)
