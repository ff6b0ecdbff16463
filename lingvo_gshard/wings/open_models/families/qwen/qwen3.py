"""Qwen2 and Qwen3, dense and with experts (arXiv 2407.10671, 2505.09388, section 2)."""

from __future__ import annotations

from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import GATED_SHARED, experts
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FULL,
    Part,
    always,
    setting,
)

# A layer may have no sliding window.
_COMMON = (
    *USUAL,
    Part(lambda config, task: config.expect("layer_types", [FULL] * task.decoder.num_layers)),
)
_QWEN2 = (*_COMMON, always({"attention.use_bias": True}))
_QWEN3 = (*_COMMON, BIASES, NORMS_BY_HEAD)
QWEN2 = decoder("qwen2", _QWEN2)
# Qwen1.5-MoE and Qwen2-57B-A14B.
QWEN2_MOE = decoder(
    "qwen2_moe",
    (
        *_COMMON,
        setting("qkv_bias", "attention.use_bias", null=False),
        experts(normalize="norm_topk_prob"),
        GATED_SHARED,
    ),
)
DENSE = decoder("qwen3", _QWEN3)
EXPERTS = decoder("qwen3_moe", (*_QWEN3, experts(normalize="norm_topk_prob")))
# MiMo (arXiv 2505.07608) computes what Qwen2 does, and has layers that predict further tokens.
MIMO = decoder("mimo", _QWEN2)
