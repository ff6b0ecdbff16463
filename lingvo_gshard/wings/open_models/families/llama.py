"""Llama: dense decoders (Llama 3, arXiv 2407.21783, section 3.2)."""

from __future__ import annotations

from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.wings.open_models.families.family import BIASES, FEED_FORWARD_BIAS, Family

_SETTINGS = (BIASES, FEED_FORWARD_BIAS)
FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    table=DECODER,
    read_task=lambda config: decoder_task(config, *_SETTINGS),
    config_of=lambda task: decoder_config(task, *_SETTINGS),
    defaults=DECODER_DEFAULTS | {"attention_bias": False, "mlp_bias": False},
)
