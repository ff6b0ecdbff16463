"""GLM-4 (arXiv 2406.12793) and GLM-4-0414: half of a head rotates, in pairs of neighbors."""

from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.family import INPUT_BIASES, always
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS

_PARTS = (*USUAL, INPUT_BIASES, always({"attention.rotary_pairs": NEIGHBORS}))
GLM = decoder("glm", _PARTS)
GLM4 = decoder("glm4", (*_PARTS, always({"decoder.layer.norm_position": "both"})))
