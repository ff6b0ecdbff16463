"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms at the outputs of sublayers, and over all heads.

OLMoE (arXiv 2409.02060) has norms at the inputs, and experts in all layers.
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import (
    NORMS_OF_HEADS,
    OUTPUT_POSITION,
    USUAL,
    decoder,
)
from lingvo_gshard.wings.open_models.families.experts import experts
from lingvo_gshard.wings.open_models.families.rope import ROPE, ropes_config, rotated_by_type

# The base of OLMo 3's rotations. transformers gives `rope_theta` to layers with full attention.
_BASE = 5e5


def _attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention."""
    bases = {family.FULL: config.get("rope_theta", None, float), family.SLIDING: _BASE}
    return rotated_by_type(config, attention, bases)


def _layers_config(task: Params) -> dict[str, Any]:
    ropes = ropes_config(
        family.pattern_of(task.decoder), {family.FULL: _BASE, family.SLIDING: _BASE}
    )
    return {**ropes, **family.windows_config(task.decoder)}


_PARTS = (family.SILU, family.BIASES, OUTPUT_POSITION, NORMS_OF_HEADS)
OLMO2 = decoder("olmo2", (*_PARTS, ROPE))
_EXPERTS = experts(hidden="intermediate_size", normalize="norm_topk_prob", coefficient=0.01)
OLMOE = decoder("olmoe", (*USUAL, NORMS_OF_HEADS, _EXPERTS))
# Experts of several owners (arXiv 2507.07024).
FLEX_OLMO = decoder("flex_olmo", (*_PARTS, ROPE, _EXPERTS))
OLMO3 = decoder(
    "olmo3",
    (
        *_PARTS,
        family.layered(
            lambda config: family.layer_types(config, period=4), _attentions, _layers_config
        ),
    ),
)
