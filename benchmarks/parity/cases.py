"""The cases of `python -m benchmarks parity`: a small model for every family and option."""

from __future__ import annotations

from typing import Any

from benchmarks.parity.case import Case
from benchmarks.parity.recent_cases import RECENT_CASES
from benchmarks.parity.translation_cases import TRANSLATION_CASES
from benchmarks.parity.values import INDEXED, LATENT, LONG, PADDED, WINDOWS, rope

LANGUAGE_MODEL_CASES = (
    Case("grouped queries", "llama"),
    Case(
        "tied softmax, one head of keys",
        "llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    Case("heads of another size", "llama", {"head_dim": 8}),
    Case("linear RoPE", "llama", rope("linear", factor=4.0)),
    Case(
        "dynamic NTK RoPE", "llama", {**rope("dynamic", factor=4.0), "max_position_embeddings": 16}
    ),
    Case(
        "Llama 3 RoPE",
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    Case("YaRN", "llama", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    Case("biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("no window", "mistral", {"sliding_window": None}),
    Case("sliding window", "mistral", {"sliding_window": 6}),
    Case("biases of queries, keys and values", "qwen2"),
    Case(
        "windows in later layers",
        "qwen2",
        {**WINDOWS, "use_sliding_window": True, "max_window_layers": 1},
    ),
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
            **LATENT,
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
            **LATENT,
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
            **LATENT,
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
            **LATENT,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "attention_bias": True,
        },
    ),
)
_MOE = {"num_local_experts": 8, "num_experts_per_tok": 3}
_GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
}
_SHORT, _LONG_FACTORS = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], [2.0, 3.0, 5.0, 8.0, 12.0, 16.0]


def _longrope(original: int, **parameters: float) -> dict[str, Any]:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": _SHORT,
        "long_factor": _LONG_FACTORS,
        "original_max_position_embeddings": original,
        **parameters,
    }
    return {**LONG, **PADDED, "rope_parameters": rope}


# Families that were made of the parts of those above.
COMPOSED_CASES = (
    Case("zero-centered norms, GELU", "gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    Case("norms at outputs and over all heads", "olmo2"),
    Case("biases", "olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    Case(
        "windows, two rotations",
        "olmo3",
        {
            **WINDOWS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            },
        },
    ),
    Case("rotations in windows only", "exaone4", WINDOWS),
    Case(
        "no window",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    Case("layers without rotations", "smollm3", {**PADDED, "num_hidden_layers": 4}),
    Case(
        "windows in layers without rotations, biases",
        "smollm3",
        {
            **PADDED,
            **WINDOWS,
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    Case("biases but at the output", "seed_oss", {"head_dim": 16}),
    Case("biases everywhere", "seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    Case(
        "joined tensors, half of a head rotates", "phi3", {**PADDED, "partial_rotary_factor": 0.5}
    ),
    Case("LongRoPE, short texts", "phi3", _longrope(64)),
    Case("LongRoPE, long texts, window", "phi3", {**_longrope(8), "sliding_window": 6}),
    Case(
        "gates of near scores, LongRoPE",
        "phimoe",
        {
            **_longrope(64, short_mscale=1.2, long_mscale=1.3),
            "num_local_experts": 8,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    Case("norms of rotated queries and keys", "hunyuan_v1_dense", {"head_dim": 16}),
    Case(
        "NTK by alpha",
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "factor": 1.0,
                "alpha": 50.0,
            },
        },
    ),
    Case(
        "experts and a shared one",
        "hunyuan_v1_moe",
        {"head_dim": 16, "num_experts": 8, "moe_topk": 3, "tie_word_embeddings": True},
    ),
    Case("constant factors", "granite", {**_GRANITE, "mlp_bias": True, "attention_bias": True}),
    Case("joined experts", "granitemoe", {**_GRANITE, **_MOE, "tie_word_embeddings": True}),
    Case(
        "joined experts and a shared one",
        "granitemoeshared",
        {**_GRANITE, **_MOE, "shared_intermediate_size": 40},
    ),
    Case("pairs of neighbors, biases", "ernie4_5", {"use_bias": True, "head_dim": 16}),
    Case(
        "biased softmax, shared experts",
        "ernie4_5_moe",
        {
            "moe_intermediate_size": 24,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
            "num_hidden_layers": 4,
        },
    ),
    Case(
        "biases everywhere, an odd number of layers",
        "ernie4_5_moe",
        {
            "moe_intermediate_size": 24,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
            "num_hidden_layers": 5,
            "moe_num_shared_experts": 0,
            "use_bias": True,
        },
    ),
    Case(
        "windows, shared experts, selection bias",
        "dots1",
        {
            **WINDOWS,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "max_window_layers": 2,
        },
    ),
    Case(
        "norms over all heads, selection bias",
        "minimax_m2",
        {**_MOE, "head_dim": 16, "rotary_dim": 8},
    ),
    Case(
        "layers without rotations, a gate of each input",
        "llama4_text",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 40,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    Case(
        "experts in all layers, Llama 3 RoPE",
        "llama4_text",
        {
            **rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=1.0,
                original_max_position_embeddings=16,
            ),
            "head_dim": 16,
            "use_qk_norm": False,
            "attention_bias": True,
            "num_local_experts": 4,
            "no_rope_layer_interval": 2,
        },
    ),
    Case(
        "chunks and warmer queries, shorter than the texts",
        "llama4_text",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 40,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": 10,
            "floor_scale": 4,
            "attn_scale": 0.3,
        },
    ),
    Case(
        "sinks and more key heads in windows, values of another size",
        "mimo_v2_flash",
        {
            "head_dim": 24,
            "v_head_dim": 16,
            "num_hidden_layers": 5,
            "num_key_value_heads": 1,
            "sliding_window": 6,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
            "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 2],
        },
    ),
    Case(
        "fewer tokens than a text has, chosen by the indexer",
        "deepseek_v32",
        {
            **LATENT,
            **INDEXED,
            "index_n_heads": 16,
            "index_topk": 9,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    Case(
        "as many tokens as the indexer chooses",
        "deepseek_v32",
        {
            **LATENT,
            **INDEXED,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    Case(
        "sublayers side by side",
        "cohere",
        {"logit_scale": 0.3, "tie_word_embeddings": True},
    ),
    Case(
        "sublayers side by side, a norm for each head",
        "cohere",
        {"logit_scale": 0.3, "tie_word_embeddings": True, "use_qk_norm": True},
    ),
    Case(
        "sublayers side by side, rotations in windows only",
        "cohere2",
        {**WINDOWS, "logit_scale": 0.3, "attention_bias": True},
    ),
)
_NET = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}
_NET_EXPERTS = {
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 40,
}
_MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_d_head": 24,
    "mamba_d_state": 6,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_n_heads": 4,
    "num_hidden_layers": 3,
    "shared_intermediate_size": 40,
}
_NEMOTRON = {
    "head_dim": 16,
    "mamba_head_dim": 6,
    "mamba_num_heads": 4,
    "n_groups": 2,
    "ssm_state_size": 8,
}
RECURRENT_CASES = (
    Case("gated delta nets, gated attention", "qwen3_next", {**_NET, **_NET_EXPERTS}),
    Case(
        "biases, every layer a gated delta net but the last",
        "qwen3_next",
        {
            **_NET,
            **_NET_EXPERTS,
            "attention_bias": True,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 2,
            "norm_topk_prob": False,
        },
    ),
    Case(
        "gated delta nets, values of another size",
        "qwen3_5_text",
        {**_NET, "linear_value_head_dim": 12, "tie_word_embeddings": True},
    ),
    Case(
        "gated delta nets, experts",
        "qwen3_5_moe_text",
        {**_NET, **_NET_EXPERTS},
    ),
    Case(
        "Mamba-2 and an attention without positions, a shared expert",
        "granitemoehybrid",
        {**_MAMBA, **_GRANITE, **_MOE, "tie_word_embeddings": True},
    ),
    Case(
        "Mamba-2 and rotating attentions with biases, dense",
        "granitemoehybrid",
        {
            **_MAMBA,
            **_GRANITE,
            "attention_bias": True,
            "mamba_conv_bias": False,
            "mamba_n_groups": 1,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
        },
    ),
    Case(
        "layers with one sublayer each: Mamba-2, experts, an attention",
        "nemotron_h",
        {
            **_NEMOTRON,
            "hybrid_override_pattern": "MEM*E",
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
        },
    ),
    Case(
        "layers with one sublayer each: experts that compute smaller vectors",
        "nemotron_h",
        {
            **_NEMOTRON,
            "hybrid_override_pattern": "ME*E",
            "moe_intermediate_size": 24,
            "moe_latent_size": 20,
            "moe_shared_expert_intermediate_size": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    Case(
        "layers with one sublayer each: no experts, biases",
        "nemotron_h",
        {
            **_NEMOTRON,
            "hybrid_override_pattern": "M-M-*-",
            "mlp_bias": True,
            "n_groups": 1,
            "use_conv_bias": False,
        },
    ),
)
CASES = (
    *LANGUAGE_MODEL_CASES,
    *COMPOSED_CASES,
    *RECENT_CASES,
    *RECURRENT_CASES,
    *TRANSLATION_CASES,
)
