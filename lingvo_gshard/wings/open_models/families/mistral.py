"""Mistral: dense decoders with a sliding window (arXiv 2310.06825, section 2)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.wings.open_models.families.experts import LOCAL_EXPERTS, MIXTRAL_EXPERTS
from lingvo_gshard.wings.open_models.families.family import (
    JITTER,
    Family,
    settings_config,
    sliding_window,
    windows_config,
)

_DEFAULTS = DECODER_DEFAULTS | {
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_EXPERTS_DEFAULTS = _DEFAULTS | {
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "sliding_window": None,
}


def sliding_task(config: PublishedConfig) -> Params:
    """Returns `decoder_task` with the sliding window of Mistral's and Mixtral's configs."""
    task = decoder_task(config)
    task.decoder.layer.self_attention.window = sliding_window(config)
    return task


def sliding_config(task: Params) -> dict[str, Any]:
    """Returns what `sliding_task` reads, from the Params of a task."""
    window = windows_config(task.decoder)["sliding_window"]
    return {**decoder_config(task), "sliding_window": window}


DENSE = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    table=DECODER,
    read_task=sliding_task,
    config_of=sliding_config,
    defaults=_DEFAULTS,
)


def _task(config: PublishedConfig) -> Params:
    task = sliding_task(config)
    LOCAL_EXPERTS.read(config, task.decoder)
    JITTER.read(config, task)
    return task


def _config(task: Params) -> dict[str, Any]:
    return {
        **sliding_config(task),
        **LOCAL_EXPERTS.config(task.decoder),
        **settings_config(task, (JITTER,)),
    }


EXPERTS = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    table=(*DECODER, *MIXTRAL_EXPERTS),
    read_task=_task,
    config_of=_config,
    defaults=_EXPERTS_DEFAULTS,
    aliases={"num_experts": "num_local_experts"},
)
