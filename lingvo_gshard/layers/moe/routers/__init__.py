"""Routers, one file each: they decide which experts compute a token."""

from lingvo_gshard.layers.moe.routers.top2 import Top2Router
from lingvo_gshard.layers.moe.routers.top_k import SwitchRouter, TopKRouter

__all__ = [
    "SwitchRouter",
    "Top2Router",
    "TopKRouter",
]
