"""Mistral: dense decoders with a sliding window (arXiv 2310.06825, section 2)."""

from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import LOCAL_EXPERTS
from lingvo_gshard.wings.open_models.families.family import JITTER, WINDOW

DENSE = decoder("mistral", (*USUAL, WINDOW))
EXPERTS = decoder("mixtral", (*USUAL, WINDOW, LOCAL_EXPERTS, JITTER))
