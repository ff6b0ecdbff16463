"""Routers, one file each: they decide which experts compute a token."""

from lingvo_gshard.layers.moe.routers.expert_choice import ExpertChoiceRouter
from lingvo_gshard.layers.moe.routers.hashed import HashRouter
from lingvo_gshard.layers.moe.routers.top2 import Top2Router
from lingvo_gshard.layers.moe.routers.top_k import SwitchRouter, TopKRouter

__all__ = [
    "ExpertChoiceRouter",
    "HashRouter",
    "SwitchRouter",
    "Top2Router",
    "TopKRouter",
]
