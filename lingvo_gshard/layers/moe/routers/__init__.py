"""Routers, one file each: they decide which experts compute a token."""

from lingvo_gshard.layers.moe.routers.top2 import Top2Router as Top2Router
from lingvo_gshard.layers.moe.routers.top_k import SwitchRouter as SwitchRouter
from lingvo_gshard.layers.moe.routers.top_k import TopKRouter as TopKRouter
