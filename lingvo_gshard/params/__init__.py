"""Experiments: small functions that return Params; importing this room registers all of them."""

from lingvo_gshard.params import gshard_paper, translation

__all__ = ["gshard_paper", "translation"]
