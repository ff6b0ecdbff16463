"""Llama: dense decoders (Llama 3, arXiv 2407.21783, section 3.2)."""

from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.family import BIASES, FEED_FORWARD_BIAS

FAMILY = decoder("llama", (*USUAL, BIASES, FEED_FORWARD_BIAS))
