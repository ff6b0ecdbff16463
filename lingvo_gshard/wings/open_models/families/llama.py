"""Llama: dense decoders (Llama 3, arXiv 2407.21783, section 3.2), and families that are Llamas.

Helium's rotations have pairs of neighbors.
"""

from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FEED_FORWARD_BIAS,
    INPUT_BIASES,
    always,
)
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS

_PARTS = (*USUAL, BIASES, FEED_FORWARD_BIAS)
FAMILY = decoder("llama", _PARTS)
HELIUM = decoder(
    "helium",
    (*USUAL, INPUT_BIASES, FEED_FORWARD_BIAS, always({"attention.rotary_pairs": NEIGHBORS})),
)
INTERNLM3 = decoder("internlm3", _PARTS)
IQUEST_CODER = decoder("iquestcoder", _PARTS)
