"""gpt-oss: experts with biases and clamped gates, attention sinks (arXiv 2508.10925)."""

from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import LOCAL_EXPERTS

_BIASED = {
    "decoder.moe.router.use_bias": True,
    "decoder.moe.experts.use_bias": True,
    "decoder.moe.experts.activation": "clamped_swiglu",
}
FAMILY = decoder(
    "gpt_oss",
    (
        *USUAL,
        family.BIASES,
        family.always({"attention.use_sinks": True}),
        family.layered(lambda config: family.layer_types(config, period=2)),
        LOCAL_EXPERTS,
        family.always(_BIASED),
        family.setting("swiglu_alpha", "decoder.moe.experts.gate_alpha", kind=float),
        family.setting("swiglu_limit", "decoder.moe.experts.gate_limit", kind=float),
    ),
)
