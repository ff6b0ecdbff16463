"""gpt-oss: experts with biases and clamped gates, attention sinks (arXiv 2508.10925)."""

from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import LOCAL_EXPERTS
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    always,
    layer_types,
    layered,
    setting,
)

_BIASED = {
    "decoder.moe.router.use_bias": True,
    "decoder.moe.experts.use_bias": True,
    "decoder.moe.experts.activation": "clamped_swiglu",
}
FAMILY = decoder(
    "gpt_oss",
    (
        *USUAL,
        BIASES,
        always({"attention.use_sinks": True}),
        layered(lambda config: layer_types(config, period=2)),
        LOCAL_EXPERTS,
        always(_BIASED),
        setting("swiglu_alpha", "decoder.moe.experts.gate_alpha", kind=float),
        setting("swiglu_limit", "decoder.moe.experts.gate_limit", kind=float),
    ),
)
