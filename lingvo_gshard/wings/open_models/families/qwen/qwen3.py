"""Qwen2 and Qwen3, dense and with experts (arXiv 2407.10671, 2505.09388, section 2)."""

from __future__ import annotations

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import ALL_SPARSE, experts
from lingvo_gshard.wings.open_models.families.family import BIASES, FULL, Part, always, fixed


def _read_types(config: PublishedConfig, task: Params) -> None:
    """Checks that no layer has a sliding window."""
    del task
    for kind in config.get("layer_types", [], list):
        if kind != FULL:
            raise UserError(
                f"{config.where}: layer_types has {kind!r}, which is not supported without "
                f"use_sliding_window; {FULL!r} was expected"
            )


_COMMON = (
    *USUAL,
    fixed({"use_sliding_window": False}),
    Part(_read_types),
)
_QWEN2 = (*_COMMON, always({"attention.use_bias": True}))
_QWEN3 = (*_COMMON, BIASES, NORMS_BY_HEAD)
QWEN2 = decoder("qwen2", _QWEN2)
DENSE = decoder("qwen3", _QWEN3)
EXPERTS = decoder("qwen3_moe", (ALL_SPARSE, *_QWEN3, experts(normalize="norm_topk_prob")))
# MiMo (arXiv 2505.07608) computes what Qwen2 does, and has layers that predict further tokens.
MIMO = decoder("mimo", _QWEN2)
