"""Mellum 2: Qwen3's experts, and windows whose rotations have a base of their own.

https://huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, decoder
from lingvo_gshard.wings.open_models.families.experts import dense_layers, experts, types_config
from lingvo_gshard.wings.open_models.families.rope import ropes_config, rotated_by_type

_BASES = {family.FULL: 5e5, family.SLIDING: 1e4}


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention."""
    return family.types_of_layers(config, [family.FULL] * config.get("num_hidden_layers"))


def _layers_config(task: Params) -> dict[str, Any]:
    return {
        **ropes_config(family.pattern_of(task.decoder), _BASES),
        **family.windows_config(task.decoder),
    }


def _read_dense(config: PublishedConfig, task: Params) -> None:
    task.decoder.dense_first = dense_layers(config, 0, by_type=True)


FAMILY = decoder(
    "mellum",
    (
        family.SILU,
        family.BIASES,
        NORMS_BY_HEAD,
        family.layered(
            _kinds,
            lambda config, attention: rotated_by_type(config, attention, _BASES),
            _layers_config,
        ),
        family.Part(_read_dense, types_config),
        experts(normalize="norm_topk_prob"),
        family.IN_PERIODS,
    ),
    read_positions=family.given_positions,
)
