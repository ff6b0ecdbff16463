"""Seed-OSS: a dense decoder with biases (https://github.com/ByteDance-Seed/seed-oss)."""

from __future__ import annotations

from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.wings.open_models.families.family import FEED_FORWARD_BIAS, Family, Setting

_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "head_dim": 128,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "residual_dropout": 0.1,
    "vocab_size": 155136,
}
_SETTINGS = (
    Setting("attention_bias", ("attention.use_bias",), False),
    Setting("attention_out_bias", ("attention.use_output_bias",), False),
    FEED_FORWARD_BIAS,
    Setting("residual_dropout", ("decoder.residual_dropout_rate",), 0.0),
)
FAMILY = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    table=DECODER,
    read_task=lambda config: decoder_task(config, *_SETTINGS),
    config_of=lambda task: decoder_config(task, *_SETTINGS),
    defaults=_DEFAULTS,
)
