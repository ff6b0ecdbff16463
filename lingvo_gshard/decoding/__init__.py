"""Decoding: translates sentences and continues texts with a trained model."""

from lingvo_gshard.decoding.beam import beam_decode
from lingvo_gshard.decoding.greedy import greedy_decode
from lingvo_gshard.decoding.sampling import Sampling
from lingvo_gshard.decoding.translator import Translations, Translator
from lingvo_gshard.decoding.writer import Text, Writer

__all__ = [
    "Sampling",
    "Text",
    "Translations",
    "Translator",
    "Writer",
    "beam_decode",
    "greedy_decode",
]
