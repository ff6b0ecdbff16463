"""Cases of families of 2025 and 2026 that vary earlier ones."""

from __future__ import annotations

from benchmarks.parity.case import SIZES, Case
from benchmarks.parity.values import INDEXED, LATENT, PADDED, WINDOWS, rope

_GROWING = {"factor": 4.0, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.3}
_GROUPS = {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
_ROUTED = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3}
_TWO_HEADS = {
    "global_head_dim": 24,
    "head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_TWO_DENSE = {"mlp_layer_types": ["dense", "dense", "sparse"]}
_KIMI = {
    **{key: value for key, value in LATENT.items() if key != "n_routed_experts"},
    "layer_types": [*["full_attention", "linear_attention"] * 2, "full_attention"],
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 5,
    "num_local_experts": 8,
    **PADDED,
}

RECENT_CASES = (
    Case("GELU of two products, biases", "starcoder2"),
    Case(
        "GELU of two products, a window",
        "starcoder2",
        {"sliding_window": 6, "tie_word_embeddings": False, "use_bias": False},
    ),
    Case(
        "factors, norms of outputs",
        "hyperclovax",
        {
            "attention_multiplier": 0.4,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.7,
        },
    ),
    Case("factors, norms of inputs", "hyperclovax", {"use_post_norm": False}),
    Case(
        "a window in most layers",
        "cwm",
        {"num_hidden_layers": 5, "sliding_window": 6, "rope_parameters": {"rope_type": "default"}},
    ),
    Case(
        "Llama 3 RoPE, types of layers",
        "cwm",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    Case("squared ReLU", "arcee"),
    Case("squared ReLU, biases", "arcee", {"attention_bias": True, "mlp_bias": True}),
    Case("squared ReLU, LayerNorm, biases", "jais2"),
    Case(
        "YaRN, queries that grow with positions",
        "ministral3",
        {
            **PADDED,
            **rope("yarn", **_GROWING, mscale=1.0, mscale_all_dim=1.0, beta_fast=4.0),
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        "YaRN with the paper's magnitude, sliding window",
        "ministral3",
        {**PADDED, **rope("yarn", **_GROWING), "head_dim": 16, "sliding_window": 6},
    ),
    Case(
        "latent attention, queries that grow, groups of softmax scores",
        "mistral4",
        {
            **PADDED,
            **LATENT,
            **_GROUPS,
            **rope("yarn", **_GROWING, mscale=1.0, mscale_all_dim=1.0),
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    Case(
        "pairs of halves, queries without a rank, gates as they are",
        "mistral4",
        {
            **PADDED,
            **LATENT,
            **rope("yarn", **_GROWING),
            "q_lora_rank": None,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "attention_bias": True,
        },
    ),
    Case(
        "windows in some layers",
        "ministral",
        {
            **WINDOWS,
            "head_dim": 16,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
        },
    ),
    Case(
        "fewer tokens than a text has, the indexer's pairs are neighbors",
        "glm_moe_dsa",
        {
            **LATENT,
            **INDEXED,
            **_GROUPS,
            "index_n_heads": 16,
            "index_topk": 9,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    Case(
        "layers that take the choice of an earlier layer's indexer",
        "glm_moe_dsa",
        {
            **LATENT,
            **INDEXED,
            **_GROUPS,
            "index_n_heads": 16,
            "index_topk": 9,
            "indexer_types": ["full", "full", "shared", *["full", "shared"] * 2],
            "first_k_dense_replace": 1,
            "num_hidden_layers": 7,
        },
    ),
    Case(
        "as many tokens as the indexer chooses, types of layers",
        "glm_moe_dsa",
        {**LATENT, **INDEXED, **_TWO_DENSE, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5},
    ),
    Case(
        "latent attention, groups, selection bias",
        "glm4_moe_lite",
        {**LATENT, **_GROUPS, "n_shared_experts": 1},
    ),
    Case(
        "pairs of halves, biases, types of layers",
        "glm4_moe_lite",
        {
            **LATENT,
            **_TWO_DENSE,
            "q_lora_rank": None,
            "num_experts_per_tok": 3,
            "rope_interleave": False,
            "attention_bias": True,
        },
    ),
    Case("half of a head rotates, joined tensors", "glm", {**PADDED, "head_dim": 16}),
    Case(
        "norms on both sides, no biases",
        "glm4",
        {**PADDED, "head_dim": 16, "attention_bias": False},
    ),
    Case("latent attention without experts", "youtu", {**LATENT, "tie_word_embeddings": True}),
    Case(
        "experts in all layers, shared expert, selection bias",
        "solar_open",
        {**_ROUTED, "head_dim": 16, "n_shared_experts": 1},
    ),
    Case(
        "groups of experts, biases",
        "solar_open",
        {**_ROUTED, **_GROUPS, "head_dim": 16, "n_shared_experts": 2, "attention_bias": True},
    ),
    Case(
        "gated shared expert",
        "qwen2_moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 40},
    ),
    Case(
        "normalized gates, no biases",
        "qwen2_moe",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    Case(
        "windows in every other early layer",
        "qwen2_moe",
        {
            **WINDOWS,
            **_EXPERTS,
            "shared_expert_intermediate_size": 40,
            "use_sliding_window": True,
            "max_window_layers": 3,
        },
    ),
    Case(
        "windows in all layers",
        "qwen3_moe",
        {**WINDOWS, **_EXPERTS, "head_dim": 16, "use_sliding_window": True},
    ),
    Case(
        "two rotations, windows, one dense layer",
        "mellum",
        {
            **WINDOWS,
            **_EXPERTS,
            "head_dim": 16,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    Case(
        "norms of queries and keys, shared experts, selection bias",
        "hy_v3",
        {**_EXPERTS, "head_dim": 16, "num_shared_experts": 2, "attention_bias": True},
    ),
    Case(
        "rotations in windows only, shared expert, groups",
        "exaone_moe",
        {**WINDOWS, **_EXPERTS, **_GROUPS, "head_dim": 16, "num_shared_experts": 1},
    ),
    Case(
        "norms at outputs and over all heads, experts",
        "flex_olmo",
        {**PADDED, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    Case(
        "gated attention, rotations in windows only, norms on both sides, shared experts",
        "afmoe",
        {
            **WINDOWS,
            **_EXPERTS,
            "head_dim": 16,
            "num_shared_experts": 2,
            "num_dense_layers": 2,
            "route_scale": 2.5,
            "global_attn_every_n_layers": 2,
            "mup_enabled": True,
        },
    ),
    Case(
        "soft caps, windows, no norms of outputs",
        "vaultgemma",
        {
            **WINDOWS,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    Case(
        "keys for values in full attention, heads of two sizes, soft cap",
        "gemma4_text",
        {
            **WINDOWS,
            **_TWO_HEADS,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 8.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_global_key_value_heads": 4,
        },
    ),
    Case(
        "experts beside the feed-forward layer, biases, two rotations",
        "gemma4_text",
        {
            **WINDOWS,
            **_TWO_HEADS,
            "attention_bias": True,
            "enable_moe_block": True,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "top_k_experts": 3,
            "use_bidirectional_attention": "vision",
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 10000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    Case(
        "inputs of each layer, keys and values of earlier layers, wider layers that share",
        "gemma4_text",
        {
            **WINDOWS,
            **_TWO_HEADS,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "final_logit_softcapping": 8.0,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 330,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    Case("pairs of neighbors", "helium", {**PADDED, "head_dim": 12}),
    Case("biases everywhere", "internlm3", {**PADDED, "attention_bias": True, "mlp_bias": True}),
    Case("heads of another size", "iquestcoder", {**PADDED, "head_dim": 16}),
    Case(
        "compressed and sparse attention, residual streams, experts by token ids",
        "deepseek_v4",
        {
            "num_hidden_layers": 5,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 8,
            "o_groups": 2,
            "o_lora_rank": 12,
            "layer_types": [
                "sliding_attention",
                *["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
            ],
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 6,
            },
            "sliding_window": 5,
            "index_head_dim": 16,
            "index_n_heads": 16,
            "index_topk": 3,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 3,
            "swiglu_limit": 0.5,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {name: size for name, size in SIZES.items() if name != "intermediate_size"},
    ),
    Case(
        "Kimi delta attention and latent attention without positions, experts",
        "kimi_linear",
        {**_KIMI, "q_lora_rank": None},
    ),
    Case(
        "biases, ranks of queries, groups of experts, gates over all, most layers dense",
        "kimi_linear",
        {
            **_KIMI,
            "attention_bias": True,
            "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 3,
            "mlp_layer_types": ["dense", "dense", "dense", "sparse"],
            "n_group": 4,
            "norm_topk_prob": False,
            "num_hidden_layers": 4,
            "topk_group": 2,
        },
    ),
)
