"""OLMoE: experts in all layers, and norms of queries and keys over all heads (arXiv 2409.02060)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.norm import HeadsRMSNorm
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    DECODER_DEFAULTS,
    EMBEDDINGS,
    HEADS_NORMS,
    NORMS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.open_models.families.experts import (
    balance_config,
    expert_rows,
    loss_weight,
    top_k_experts,
)
from lingvo_gshard.open_models.families.family import Family

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


def _task(config: PublishedConfig) -> Params:
    config.expect("attention_bias", False)
    config.expect("clip_qkv", None)
    task = decoder_task(config)
    task.decoder.layer.self_attention.set(
        qk_norm=True,
        query_key_norm=HeadsRMSNorm.params().set(epsilon=config.get("rms_norm_eps", kind=float)),
    )
    task.decoder.moe_every = 1
    k = config.get("num_experts_per_tok")
    task.decoder.moe = top_k_experts(
        experts=config.get("num_experts"),
        k=k,
        hidden_dim=config.get("intermediate_size"),
        normalize=config.get("norm_topk_prob", False),
        balance_weight=loss_weight(config.get("router_aux_loss_coef", 0.01), task.decoder, k),
    )
    return task


def _config(task: Params) -> dict[str, Any]:
    moe = task.decoder.moe
    return {
        **decoder_config(task),
        "attention_bias": False,
        "intermediate_size": moe.hidden_dim,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.k,
        "norm_topk_prob": moe.router.normalize,
        **balance_config(task.decoder),
    }


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    table=(*EMBEDDINGS, *ATTENTION, *HEADS_NORMS, *NORMS, *expert_rows("mlp")),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
    aliases={"num_local_experts": "num_experts"},
)
