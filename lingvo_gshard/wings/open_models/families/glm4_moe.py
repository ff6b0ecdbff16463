"""GLM-4.5: experts chosen by sigmoids with a bias, and a shared one (arXiv 2508.06471)."""

from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import SIGMOID_EXPERTS
from lingvo_gshard.wings.open_models.families.family import extra_layers, setting

FAMILY = decoder(
    "glm4_moe",
    (
        *USUAL,
        setting("attention_bias", "attention.use_bias", null=False),
        NORMS_BY_HEAD,
        setting("use_qk_norm", "attention.qk_norm", null=False),
        SIGMOID_EXPERTS,
    ),
    read_left_out=extra_layers,
)
