"""EXAONE 4.0: norms at the outputs of sublayers; only windows rotate (arXiv 2507.11407).

K-EXAONE (arXiv 2601.01739) has norms at their inputs, and experts.
"""

from __future__ import annotations

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import (
    NORMS_BY_HEAD,
    OUTPUT_POSITION,
    USUAL,
    decoder,
)
from lingvo_gshard.wings.open_models.families.experts import scaled_experts

_PERIOD = 4


def _attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params. Layers with full attention do not rotate if others have a window."""
    attentions = family.attentions_by_type(config, attention)
    if family.SLIDING in attentions:
        attentions[family.FULL].rotary_fraction = 0.0
    return attentions


def _period(config: PublishedConfig) -> int:
    """Returns the layers of a period. Every layer has full attention if there is no window."""
    if config.is_given("layer_types"):
        # Published files also have the pattern, as a text such as LLLG.
        config.get("sliding_window_pattern", None)
        return _PERIOD
    period = config.get("sliding_window_pattern", _PERIOD, least=1)
    return period if family.sliding_window(config) else 1


_PARTS = (
    *USUAL,
    NORMS_BY_HEAD,
    family.layered(lambda config: family.layer_types(config, _period(config)), _attentions),
)
DENSE = decoder("exaone4", (OUTPUT_POSITION, *_PARTS))
EXPERTS = decoder(
    "exaone_moe",
    (*_PARTS, scaled_experts("num_experts", "num_shared_experts", by_type=True), family.IN_PERIODS),
)
