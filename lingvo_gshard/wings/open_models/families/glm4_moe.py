"""GLM-4.5: experts chosen by sigmoids with a bias, and a shared one (arXiv 2508.06471)."""

from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import scaled_experts
from lingvo_gshard.wings.open_models.families.family import INPUT_BIASES, extra_layers, setting

FAMILY = decoder(
    "glm4_moe",
    (
        *USUAL,
        INPUT_BIASES,
        NORMS_BY_HEAD,
        setting("use_qk_norm", "attention.qk_norm", null=False),
        scaled_experts(),
    ),
    read_left_out=extra_layers,
)
# Experts in all layers (arXiv 2601.07022).
SOLAR_OPEN = decoder(
    "solar_open",
    (*USUAL, INPUT_BIASES, scaled_experts(dense=lambda config: 0)),
    hidden="moe_intermediate_size",
)
