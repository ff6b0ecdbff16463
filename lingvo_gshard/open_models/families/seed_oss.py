"""Seed-OSS: a dense decoder with biases (https://github.com/ByteDance-Seed/seed-oss)."""

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
    FEED_FORWARD_BIASES,
    NORMS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.open_models.families.family import Family

_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "residual_dropout": 0.1,
    "vocab_size": 155136,
}


def _task(config: PublishedConfig) -> Params:
    task = decoder_task(config)
    decoder, layer = task.decoder, task.decoder.layer
    decoder.residual_dropout_rate = config.get("residual_dropout", 0.0)
    layer.self_attention.set(
        use_bias=config.get("attention_bias", False),
        use_output_bias=config.get("attention_out_bias", False),
    )
    layer.feed_forward.use_bias = config.get("mlp_bias", False)
    return task


def _config(task: Params) -> dict[str, Any]:
    attention = task.decoder.layer.self_attention
    return {
        **decoder_config(task),
        "attention_bias": attention.use_bias,
        "attention_out_bias": attention.use_output_bias,
        "mlp_bias": task.decoder.layer.feed_forward.use_bias,
        "residual_dropout": task.decoder.residual_dropout_rate,
    }


FAMILY = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    table=(
        *EMBEDDINGS,
        *ATTENTION,
        *ATTENTION_BIASES,
        *NORMS,
        *FEED_FORWARD,
        *FEED_FORWARD_BIASES,
    ),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
)
