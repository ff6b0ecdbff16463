"""NLLB-MoE: M2M-100 with two of many experts in every n-th layer (arXiv 2207.04672, section 6)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import TopKRouter
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.family import Family
from lingvo_gshard.wings.open_models.families.translation.common import add_experts, experts_config
from lingvo_gshard.wings.open_models.families.translation.fairseq import FAIRSEQ
from lingvo_gshard.wings.open_models.families.translation.m2m_100 import (
    m2m_100_config,
    m2m_100_task,
)

_SIDES = ("encoder", "decoder")
_EXPERTS_PER_TOKEN = 2


def _task(config: PublishedConfig) -> Params:
    task = m2m_100_task(config)
    router = TopKRouter.params().set(
        k=_EXPERTS_PER_TOKEN,
        normalize=True,
        # Training drops outputs of experts, and inference scales them instead (section 6.2).
        scale=1.0 - config.get("moe_token_dropout", kind=float),
        use_bias=config.get("router_bias", False),
    )
    for side in _SIDES:
        stack = task.get(side)
        every = config.get(f"{side}_sparse_step", kind=int, least=0)
        add_experts(config, stack, router, every, k=_EXPERTS_PER_TOKEN)
        stack.moe.experts.use_bias = True
    return task


def _config(task: Params) -> dict[str, Any]:
    moe = task.encoder.moe
    # The gates of other routers sum to 1.
    scale = moe.router.scale if "scale" in moe.router else 1.0
    return {
        **m2m_100_config(task),
        **experts_config(task.encoder, _EXPERTS_PER_TOKEN),
        "second_expert_policy": "all",
        "moe_token_dropout": round(1.0 - scale, 9),
        "encoder_sparse_step": task.encoder.moe_every,
        "decoder_sparse_step": task.decoder.moe_every,
    }


FAMILY = Family(model_type="nllb-moe", read_task=_task, config_of=_config, **FAIRSEQ)
