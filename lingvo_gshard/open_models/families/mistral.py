"""Mistral: dense decoders with a sliding window (arXiv 2310.06825, section 2)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    EMBEDDINGS,
    FEED_FORWARD,
    NORMS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.open_models.families.experts import (
    expert_rows,
    loss_coefficient,
    loss_weight,
    top_k_experts,
)
from lingvo_gshard.open_models.families.family import Family


def sliding_task(config: PublishedConfig) -> Params:
    """Returns `decoder_task` with the sliding window of Mistral's and Mixtral's configs."""
    task = decoder_task(config)
    # A published window counts the position itself; ours is the largest distance.
    window = config.get("sliding_window", 0)
    task.decoder.layer.self_attention.window = max(window - 1, 0)
    return task


def sliding_config(task: Params) -> dict[str, Any]:
    """Returns what `sliding_task` reads, from the Params of a task."""
    window = task.decoder.layer.self_attention.window
    return {**decoder_config(task), "sliding_window": window + 1 if window else None}


DENSE = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    table=(*EMBEDDINGS, *ATTENTION, *NORMS, *FEED_FORWARD),
    task_of=sliding_task,
    config_of=sliding_config,
)


def _task(config: PublishedConfig) -> Params:
    task = sliding_task(config)
    task.decoder.moe_every = 1
    k = config.get("num_experts_per_tok")
    task.decoder.moe = top_k_experts(
        experts=config.get("num_local_experts"),
        k=k,
        hidden_dim=config.get("intermediate_size"),
        normalize=True,
        balance_weight=loss_weight(config.get("router_aux_loss_coef", 0.001), task.decoder, k),
    )
    task.decoder.moe.router.jitter = config.get("router_jitter_noise", 0.0)
    return task


def _config(task: Params) -> dict[str, Any]:
    moe = task.decoder.moe
    return {
        **sliding_config(task),
        "intermediate_size": moe.hidden_dim,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.k,
        "router_aux_loss_coef": loss_coefficient(
            moe.router.auxiliary_loss_weight, task.decoder, moe.router.k
        ),
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
    task_of=_task,
    config_of=_config,
)
