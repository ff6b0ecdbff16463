"""The cases of `gshard-bench parity`: a small model for every family and option."""

from __future__ import annotations

from typing import Any

from benchmarks.parity.case import Case
from benchmarks.parity.translation_cases import TRANSLATION_CASES

_LONG = {"max_position_embeddings": 128}


def _rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {**_LONG, "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
}


LANGUAGE_MODEL_CASES = (
    Case("grouped queries", "llama"),
    Case(
        "tied softmax, one head of keys",
        "llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    Case("heads of another size", "llama", {"head_dim": 8}),
    Case("linear RoPE", "llama", _rope("linear", factor=4.0)),
    Case(
        "dynamic NTK RoPE", "llama", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 16}
    ),
    Case(
        "Llama 3 RoPE",
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    Case("YaRN", "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    Case("biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("no window", "mistral", {"sliding_window": None}),
    Case("sliding window", "mistral", {"sliding_window": 6}),
    Case("biases of queries, keys and values", "qwen2"),
    Case("norms of queries and keys", "qwen3", {"head_dim": 16}),
    Case(
        "gates over all experts",
        "qwen3_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
        },
    ),
    Case(
        "normalized gates",
        "qwen3_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    Case(
        "eight experts",
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    ),
    Case("experts, norms over all heads", "olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    Case(
        "soft caps, windows, norms on both sides",
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    Case(
        "an odd number of layers",
        "gemma2",
        {"head_dim": 16, "sliding_window": 6, "tie_word_embeddings": True},
    ),
    Case(
        "two rotations, norms of queries and keys",
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "num_hidden_layers": 8,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2
            + ["sliding_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            },
        },
    ),
    Case(
        "sinks, clamped gates, biases, YaRN",
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
                "rope_theta": 10000.0,
            },
        },
    ),
    Case(
        "shared expert, selection bias",
        "glm4_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    Case(
        "groups of experts, biases, norms of queries and keys",
        "glm4_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    Case(
        "latent attention, shared experts",
        "deepseek_v2",
        {
            **_LATENT,
            "num_experts_per_tok": 3,
            "topk_method": "greedy",
            "routed_scaling_factor": 2.0,
            "first_k_dense_replace": 1,
        },
    ),
    Case(
        "queries without a rank, groups of experts",
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    Case(
        "latent attention, groups, selection bias, YaRN",
        "deepseek_v3",
        {
            **_LATENT,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
            "n_shared_experts": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    Case(
        "pairs of halves, biases",
        "deepseek_v3",
        {
            **_LATENT,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "attention_bias": True,
        },
    ),
)
CASES = (*LANGUAGE_MODEL_CASES, *TRANSLATION_CASES)
