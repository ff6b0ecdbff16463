"""GLM-4 (arXiv 2406.12793), GLM-4-0414 and GLM-4.5 (arXiv 2508.06471).

In the first two, half of a head rotates, in pairs of neighbors. GLM-4.5 has experts that are chosen
by sigmoids with a bias, and a shared one.
"""

from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import scaled_experts
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS

_PARTS = (*USUAL, family.INPUT_BIASES, family.always({"attention.rotary_pairs": NEIGHBORS}))
GLM = decoder("glm", _PARTS)
GLM4 = decoder("glm4", (*_PARTS, family.always({"decoder.layer.norm_position": "both"})))
EXPERTS = decoder(
    "glm4_moe",
    (
        *USUAL,
        family.INPUT_BIASES,
        NORMS_BY_HEAD,
        family.setting("use_qk_norm", "attention.qk_norm", null=False),
        scaled_experts(),
    ),
    read_left_out=family.extra_layers,
)
# Experts in all layers (arXiv 2601.07022).
SOLAR_OPEN = decoder(
    "solar_open",
    (*USUAL, family.INPUT_BIASES, scaled_experts(dense=0)),
    hidden="moe_intermediate_size",
)
