"""Llama: dense decoders (Llama 3, arXiv 2407.21783, section 3.2)."""

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
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}


def _task(config: PublishedConfig) -> Params:
    task = decoder_task(config)
    layer, has_bias = task.decoder.layer, config.get("attention_bias", False)
    layer.self_attention.set(use_bias=has_bias, use_output_bias=has_bias)
    layer.feed_forward.use_bias = config.get("mlp_bias", False)
    return task


def _config(task: Params) -> dict[str, Any]:
    layer = task.decoder.layer
    return {
        **decoder_config(task),
        "attention_bias": layer.self_attention.use_bias,
        "mlp_bias": layer.feed_forward.use_bias,
    }


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
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
