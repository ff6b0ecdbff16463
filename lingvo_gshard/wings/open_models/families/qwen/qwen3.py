"""Qwen2 and Qwen3, dense and with experts (arXiv 2407.10671, 2505.09388, section 2)."""

from __future__ import annotations

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    NORMS_BY_HEAD,
    USUAL,
    decoder,
)
from lingvo_gshard.wings.open_models.families.experts import ALL_SPARSE, expert_rows, experts
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FULL,
    Part,
    always,
    fixed,
    unread,
)

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
    fixed({"use_sliding_window": False}, is_written=True),
    # They have no meaning without use_sliding_window.
    unread("sliding_window", "max_window_layers"),
    Part(_read_types),
)
_QWEN2 = (*_COMMON, always({"attention.use_bias": True}))
_QWEN3 = (*_COMMON, BIASES, fixed({"use_qk_norm": True}), NORMS_BY_HEAD)
QWEN2 = decoder(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    parts=_QWEN2,
    defaults=_QWEN2_DEFAULTS,
)
DENSE = decoder(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    parts=_QWEN3,
    defaults=_DEFAULTS,
)
EXPERTS = decoder(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    table=(*DECODER, *expert_rows("mlp")),
    parts=(ALL_SPARSE, *_QWEN3, experts(normalize="norm_topk_prob")),
    defaults=_EXPERTS_DEFAULTS,
    aliases={"num_local_experts": "num_experts"},
)
# MiMo (arXiv 2505.07608) computes what Qwen2 does, and has layers that predict further tokens.
MIMO = decoder(
    model_type="mimo",
    architecture="MiMoForCausalLM",
    parts=(fixed({"attention_bias": True}), unread("num_nextn_predict_layers"), *_QWEN2),
    defaults=_QWEN2_DEFAULTS,
    read_left_out=lambda config: ("model.mtp_layers.",),
)
