"""Mistral: dense decoders with a sliding window (arXiv 2310.06825, section 2)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    EMBEDDINGS,
    FEED_FORWARD,
    NORMS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.open_models.families.family import Family


def sliding_task(config: PublishedConfig) -> Params:
    """Returns `decoder_task` with the sliding window of Mistral's and Mixtral's configs."""
    task = decoder_task(config)
    # A published window counts the position itself; ours is the largest distance.
    window = config.get("sliding_window", 0)
    task.decoder.layer.self_attention.window = max(window - 1, 0)
    return task


def sliding_config(task: Params) -> dict[str, Any]:
    """Returns what `sliding_task` reads, from the Params of a task."""
    window = task.decoder.layer.self_attention.window
    return {**decoder_config(task), "sliding_window": window + 1 if window else None}


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    table=(*EMBEDDINGS, *ATTENTION, *NORMS, *FEED_FORWARD),
    task_of=sliding_task,
    config_of=sliding_config,
)
