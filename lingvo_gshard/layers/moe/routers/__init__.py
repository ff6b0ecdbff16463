"""Routers, each a file: which experts compute a token."""

from lingvo_gshard.layers.moe.routers.top2 import Top2Router

__all__ = ["Top2Router"]
