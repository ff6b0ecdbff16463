"""GLM-4.5: experts chosen by sigmoids with a bias, and a shared one (arXiv 2508.06471)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    ATTENTION_BIASES,
    DECODER_DEFAULTS,
    EMBEDDINGS,
    FEED_FORWARD,
    HEAD_NORMS,
    NORMS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.open_models.families.experts import (
    EXPERT_ALIASES,
    SHARED_EXPERT,
    dense_layers,
    expert_rows,
    sigmoid_config,
    sigmoid_experts,
)
from lingvo_gshard.open_models.families.family import Family, extra_layers

_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def _task(config: PublishedConfig) -> Params:
    task = decoder_task(config)
    attention = task.decoder.layer.self_attention
    attention.use_bias = config.get("attention_bias", False)
    attention.qk_norm = config.get("use_qk_norm", False)
    attention.query_key_norm.epsilon = config.get("rms_norm_eps", kind=float)
    task.decoder.set(
        dense_first=dense_layers(config),
        moe_every=1,
        moe=sigmoid_experts(config),
    )
    return task


def _config(task: Params) -> dict[str, Any]:
    attention = task.decoder.layer.self_attention
    return {
        **decoder_config(task),
        **sigmoid_config(task.decoder),
        "attention_bias": attention.use_bias,
        "use_qk_norm": attention.qk_norm,
    }


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    table=(
        *EMBEDDINGS,
        *ATTENTION,
        *ATTENTION_BIASES,
        *HEAD_NORMS,
        *NORMS,
        *FEED_FORWARD,
        *expert_rows("mlp"),
        *SHARED_EXPERT,
    ),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
    aliases=EXPERT_ALIASES,
    read_left_out=extra_layers,
)
