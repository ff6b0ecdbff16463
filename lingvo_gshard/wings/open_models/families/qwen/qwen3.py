"""Qwen2 and Qwen3, dense and with experts (arXiv 2407.10671, 2505.09388, section 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import GATED_SHARED, experts

_USED = "use_sliding_window"


def _windows(kinds: Callable[[PublishedConfig, int], list[str]]) -> family.Part:
    """Returns the part of layers that may have windows, if `use_sliding_window` says so.

    Args:
      kinds: returns the type of the attention of each of some layers, if windows are used.
    """

    def read(config: PublishedConfig) -> list[str]:
        layers, is_used = config.get("num_hidden_layers"), config.get(_USED, False)
        return (
            kinds(config, layers)
            if is_used
            else family.types_of_layers(config, [family.FULL] * layers)
        )

    return family.layered(read, _attentions, _layers_config)


def _attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention."""
    return (
        family.attentions_by_type(config, attention)
        if config.get(_USED, False)
        else {family.FULL: attention}
    )


def _layers_config(task: Params) -> dict[str, Any]:
    windows = family.windows_config(task.decoder)
    return {**windows, _USED: bool(windows["sliding_window"])}


def _alternating(config: PublishedConfig, layers: int) -> list[str]:
    """Returns the type of each layer's attention: every other early layer has a window."""
    end = config.get("max_window_layers", kind=int, least=0)
    return family.types_of_layers(
        config, [family.SLIDING if i % 2 == 0 and i < end else family.FULL for i in range(layers)]
    )


_LATER = _windows(lambda config, layers: family.later_windows(config))
_QWEN2 = (*USUAL, family.always({"attention.use_bias": True}), _LATER)
_QWEN3 = (*USUAL, family.BIASES, NORMS_BY_HEAD)
QWEN2 = decoder("qwen2", _QWEN2)
# Qwen1.5-MoE and Qwen2-57B-A14B.
QWEN2_MOE = decoder(
    "qwen2_moe",
    (
        *USUAL,
        family.setting("qkv_bias", "attention.use_bias", null=False),
        _windows(_alternating),
        experts(normalize="norm_topk_prob"),
        GATED_SHARED,
    ),
)
DENSE = decoder("qwen3", (*_QWEN3, _LATER))
_EVERY = _windows(
    lambda config, layers: (
        [family.SLIDING if family.sliding_window(config) else family.FULL] * layers
    )
)
EXPERTS = decoder("qwen3_moe", (*_QWEN3, _EVERY, experts(normalize="norm_topk_prob")))
# MiMo (arXiv 2505.07608) computes what Qwen2 does, and has layers that predict further tokens.
MIMO = decoder("mimo", _QWEN2)
