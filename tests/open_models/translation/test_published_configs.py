# tests: wings/open_models/families/translation/
"""Tests that configs with all keys of published models stand for the models that they describe.

Keys and values are those of the config.json of the models that the names say.
"""

import math

import pytest

from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.families import family_of
from lingvo_gshard.wings.open_models.importing import weight_specs
from lingvo_gshard.wings.open_models.weight_mapping import WeightMapping

COMMON = {"is_encoder_decoder": True, "use_cache": True, "transformers_version": "4.23.1"}
T5 = COMMON | {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "layer_norm_epsilon": 1e-06,
    "n_positions": 512,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
    "task_specific_params": {"summarization": {"num_beams": 4, "prefix": "summarize: "}},
}
FAIRSEQ = COMMON | {
    "activation_dropout": 0.0,
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "decoder_attention_heads": 16,
    "decoder_layerdrop": 0.05,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "encoder_attention_heads": 16,
    "encoder_layerdrop": 0.05,
    "eos_token_id": 2,
    "gradient_checkpointing": False,
    "init_std": 0.02,
    "max_length": 200,
    "max_position_embeddings": 1024,
    "num_beams": 5,
    "early_stopping": True,
    "pad_token_id": 1,
    "scale_embedding": True,
    "activation_function": "relu",
}
# Name -> config, and the number of weights.
PUBLISHED = {
    "t5-small": (
        T5
        | {"d_ff": 2048, "d_kv": 64, "d_model": 512, "feed_forward_proj": "relu", "num_heads": 8}
        | {"num_layers": 6, "num_decoder_layers": 6, "relative_attention_max_distance": 128},
        60_506_624,
    ),
    "flan-t5-small": (
        T5
        | {"d_ff": 1024, "d_kv": 64, "d_model": 512, "feed_forward_proj": "gated-gelu"}
        | {"num_heads": 6, "num_layers": 8, "num_decoder_layers": 8, "is_gated_act": True}
        | {"dense_act_fn": "gelu_new", "tie_word_embeddings": False},
        76_961_152,
    ),
    "mt5-small": (
        {k: v for k, v in T5.items() if k not in ("n_positions", "output_past")}
        | {"model_type": "mt5", "d_ff": 1024, "d_kv": 64, "d_model": 512, "num_heads": 6}
        | {"num_layers": 8, "num_decoder_layers": 8, "feed_forward_proj": "gated-gelu"}
        | {"tie_word_embeddings": False, "tokenizer_class": "T5Tokenizer", "vocab_size": 250112},
        300_176_768,
    ),
    "m2m100_418M": (
        FAIRSEQ
        | {"model_type": "m2m_100", "d_model": 1024, "vocab_size": 128112}
        | {"encoder_layers": 12, "decoder_layers": 12, "num_hidden_layers": 12}
        | {"encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096},
        483_905_536,
    ),
    "opus-mt": (
        FAIRSEQ
        | {"model_type": "marian", "d_model": 512, "vocab_size": 58101, "_num_labels": 3}
        | {"decoder_vocab_size": 58101, "encoder_layers": 6, "decoder_layers": 6}
        | {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "activation_function": "swish"}
        | {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "eos_token_id": 0}
        | {"add_bias_logits": False, "add_final_layer_norm": False, "classif_dropout": 0.0}
        | {"classifier_dropout": 0.0, "decoder_start_token_id": 58100, "pad_token_id": 58100}
        | {"extra_pos_embeddings": 58101, "forced_eos_token_id": 0, "bad_words_ids": [[58100]]}
        | {"normalize_before": False, "normalize_embedding": False, "num_hidden_layers": 6}
        | {"share_encoder_decoder_embeddings": True, "static_position_embeddings": True}
        | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
        # 58,101 of them are the bias of the logits.
        73_886_208 + 58_101,
    ),
    "switch-base-8": (
        {k: v for k, v in T5.items() if k != "n_positions"}
        | {"model_type": "switch_transformers", "d_ff": 3072, "d_kv": 64, "d_model": 768}
        | {"num_heads": 12, "num_layers": 12, "num_decoder_layers": 12, "num_experts": 8}
        | {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64}
        | {"num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6, "is_gated_act": False}
        | {"add_router_probs": False, "dense_act_fn": "relu", "feed_forward_proj": "relu"}
        | {"router_aux_loss_coef": 0.001, "router_bias": False, "router_dtype": "float32"}
        | {"router_ignore_padding_tokens": False, "router_jitter_noise": 0.01}
        | {"router_type": "tokens_masked", "router_z_loss_coef": 0.001},
        619_339_008,
    ),
    "nllb-moe-54b": (
        FAIRSEQ
        | {"model_type": "nllb-moe", "d_model": 2048, "vocab_size": 256206, "num_experts": 128}
        | {"encoder_layers": 24, "decoder_layers": 24, "num_hidden_layers": 24}
        | {"encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192, "expert_capacity": 64}
        | {"encoder_sparse_step": 4, "decoder_sparse_step": 4, "moe_token_dropout": 0.2}
        | {"batch_prioritized_routing": False, "moe_eval_capacity_token_fraction": 1.0}
        | {"normalize_router_prob_before_dropping": False, "second_expert_policy": "all"}
        | {"router_bias": False, "router_dtype": "float32", "router_type": "tokens_masked"}
        | {"router_ignore_padding_tokens": False, "router_aux_loss_coef": 0.001},
        54_500_569_088,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_a_model_of_its_size(name):
    values, expected = PUBLISHED[name]
    config = PublishedConfig(values, name)
    specs = weight_specs(experiment_of(config))
    found = sum(math.prod(spec.shape) for spec in specs.flatten())
    assert found == expected
    assert WeightMapping.of(family_of(config).table, specs).pieces
