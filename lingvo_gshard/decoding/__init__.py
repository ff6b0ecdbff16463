"""Decoding: from encoded sentences to token ids, one compiled loop per bucket of lengths."""

from lingvo_gshard.decoding.greedy import greedy_decode

__all__ = ["greedy_decode"]
