"""dots.llm1: Qwen3's attention with DeepSeek-V3's experts (arXiv 2506.05767)."""

from __future__ import annotations

from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import scaled_experts
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    IN_PERIODS,
    later_windows,
    layered,
)

FAMILY = decoder(
    "dots1", (*USUAL, BIASES, NORMS_BY_HEAD, layered(later_windows), scaled_experts(), IN_PERIODS)
)
