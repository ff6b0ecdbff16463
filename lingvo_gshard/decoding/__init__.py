"""Decoding: from sentences to their translations, and how good those are."""

from lingvo_gshard.decoding.beam import beam_decode
from lingvo_gshard.decoding.greedy import greedy_decode
from lingvo_gshard.decoding.translator import Translations, Translator

__all__ = ["Translations", "Translator", "beam_decode", "greedy_decode"]
