"""Experiments: small functions that return Params; importing this room registers all of them."""

from lingvo_gshard.params import translation

__all__ = ["translation"]
