"""dots.llm1: Qwen3's attention with DeepSeek-V3's experts (arXiv 2506.05767)."""

from __future__ import annotations

from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import scaled_experts
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FULL,
    IN_PERIODS,
    SLIDING,
    layered,
    types_of_layers,
)


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention."""
    layers = config.get("num_hidden_layers")
    first = config.get("max_window_layers", layers, least=0)
    has_window = config.get("sliding_window", None, int) is not None
    usual = [SLIDING if has_window and index >= first else FULL for index in range(layers)]
    return types_of_layers(config, usual)


FAMILY = decoder(
    "dots1",
    (
        *USUAL,
        BIASES,
        NORMS_BY_HEAD,
        layered(_kinds),
        scaled_experts(),
        IN_PERIODS,
    ),
)
