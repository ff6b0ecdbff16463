# tests: wings/open_models/families/
"""Tests that configs as they are published stand for models with the published number of weights.

Keys and values are those of the config.json of the models that the names say.
"""

import math

import pytest

from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.families import family_of
from lingvo_gshard.wings.open_models.importing import weight_specs
from lingvo_gshard.wings.open_models.weight_mapping import WeightMapping

COMMON = {"use_cache": True, "initializer_range": 0.02, "torch_dtype": "bfloat16"}
PUBLISHED = {
    "Granite-4.0-H-Tiny": (
        {"model_type": "granitemoehybrid", "attention_bias": False, "attention_multiplier": 2**-7}
        | {"embedding_multiplier": 12, "hidden_size": 1536, "intermediate_size": 512}
        | {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4}
        | {"logits_scaling": 6, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2}
        | {"mamba_n_groups": 1, "mamba_n_heads": 48, "max_position_embeddings": 131072}
        | {"num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40}
        | {"num_key_value_heads": 4, "num_local_experts": 64, "position_embedding_type": "nope"}
        | {"residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_theta": 10000}
        | {"shared_intermediate_size": 1024, "tie_word_embeddings": True, "vocab_size": 100352},
        6_939_037_248,
    ),
    "Kimi-Linear-48B-A3B": (
        {"model_type": "kimi_linear", "first_k_dense_replace": 1, "head_dim": 72}
        | {"hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216}
        | {"kv_lora_rank": 512, "model_max_length": 1048576, "moe_intermediate_size": 1024}
        | {"moe_renormalize": True, "num_attention_heads": 32, "num_expert_group": 1}
        | {"num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27}
        | {"num_key_value_heads": 32, "num_shared_experts": 1, "q_lora_rank": None}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "vocab_size": 163840}
        | {
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [each for each in range(1, 27) if each % 4],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            }
        },
        49_122_681_728,
    ),
    "Nemotron-3-Nano-30B-A3B": (
        {"model_type": "nemotron_h", "attention_bias": False, "chunk_size": 128, "conv_kernel": 4}
        | {"head_dim": 128, "hidden_size": 2688, "intermediate_size": 1856}
        | {"hybrid_override_pattern": f"MEMEM*{'EMEMEM*' * 4}EMEMEMEM*EMEMEMEME"}
        | {"layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_num_heads": 64}
        | {"max_position_embeddings": 262144, "moe_intermediate_size": 1856, "n_groups": 8}
        | {"moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128}
        | {"norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6}
        | {"num_hidden_layers": 52, "num_key_value_heads": 2, "routed_scaling_factor": 2.5}
        | {"ssm_state_size": 128, "tie_word_embeddings": False, "vocab_size": 131072},
        31_577_940_288,
    ),
    "gemma-2b": (
        {"model_type": "gemma", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 256}
        | {"hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048}
        | {"intermediate_size": 16384, "max_position_embeddings": 8192, "num_attention_heads": 8}
        | {"num_hidden_layers": 18, "num_key_value_heads": 1, "rms_norm_eps": 1e-06}
        | {"rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000},
        2_506_172_416,
    ),
    "Phi-3-mini-4k": (
        {"model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0}
        | {"hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192}
        | {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
        | {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32}
        | {"resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0}
        | {"sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064},
        3_821_079_552,
    ),
    "Phi-3.5-MoE": (
        {"model_type": "phimoe", "attention_bias": True, "attention_dropout": 0.0}
        | {"hidden_act": "silu", "hidden_size": 4096, "input_jitter_noise": 0.01}
        | {"intermediate_size": 6400, "lm_head_bias": True, "max_position_embeddings": 131072}
        | {"num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32}
        | {"num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-05}
        | {"original_max_position_embeddings": 4096, "output_router_logits": False}
        | {"rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01}
        | {"sliding_window": 131072, "tie_word_embeddings": False, "vocab_size": 32064}
        | {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 64,
                "long_factor": [2.0] * 64,
                "short_mscale": 1.243163121016122,
                "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 4096,
            }
        },
        41_873_153_344,
    ),
    "OLMo-2-7B": (
        {"model_type": "olmo2", "attention_bias": False, "attention_dropout": 0.0}
        | {"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008}
        | {"max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_scaling": None}
        | {"rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352},
        7_298_617_344,
    ),
    "SmolLM3-3B": (
        {"model_type": "smollm3", "attention_bias": False, "attention_dropout": 0.0}
        | {"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008}
        | {"layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536}
        | {"max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4}
        | {"no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36}
        | {"num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-06}
        | {"rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None}
        | {"use_sliding_window": False, "vocab_size": 128256},
        3_075_098_624,
    ),
    "Qwen3-Next-80B-A3B": (
        {"model_type": "qwen3_next", "attention_bias": False, "attention_dropout": 0.0}
        | {"decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256}
        | {"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120}
        | {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16}
        | {"linear_num_value_heads": 32, "linear_value_head_dim": 128, "mlp_only_layers": []}
        | {"max_position_embeddings": 262144, "moe_intermediate_size": 512}
        | {"norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512}
        | {"num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2}
        | {"output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06}
        | {"rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001}
        | {"shared_expert_intermediate_size": 512, "tie_word_embeddings": False}
        | {"use_sliding_window": False, "vocab_size": 151936},
        79_674_391_296,
    ),
    "c4ai-command-r7b": (
        {"model_type": "cohere2", "attention_bias": False, "attention_dropout": 0.0}
        | {"cache_implementation": "hybrid", "head_dim": 128, "hidden_act": "silu"}
        | {"hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps": 1e-05}
        | {"layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192}
        | {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8}
        | {
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
        }
        | {"rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096}
        | {"sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True}
        | {"use_parallel_block": True, "use_parallel_embedding": True, "vocab_size": 256000},
        8_028_033_024,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_the_published_number_of_weights(name):
    values, weights = PUBLISHED[name]
    config = PublishedConfig(COMMON | values, "config.json")
    params = experiment_of(config)
    specs = weight_specs(params)
    assert sum(math.prod(spec.shape) for spec in specs.flatten()) == weights
    assert all(WeightMapping.of(family_of(config).table, specs).of_weights().values())
