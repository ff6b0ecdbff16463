"""Routers, one file each: they decide which experts compute a token."""

from lingvo_gshard.layers.moe.routers.expert_choice import ExpertChoiceRouter
from lingvo_gshard.layers.moe.routers.forced_balance import ForcedBalanceRouter
from lingvo_gshard.layers.moe.routers.hashed import HashRouter
from lingvo_gshard.layers.moe.routers.sigmoid import BiasedSoftmaxRouter, SigmoidRouter
from lingvo_gshard.layers.moe.routers.sinkhorn import SinkhornRouter
from lingvo_gshard.layers.moe.routers.sparse_mixer import SparseMixerRouter
from lingvo_gshard.layers.moe.routers.top2 import Top2Router
from lingvo_gshard.layers.moe.routers.top_k import SwitchRouter, TopKRouter

__all__ = [
    "BiasedSoftmaxRouter",
    "ExpertChoiceRouter",
    "ForcedBalanceRouter",
    "HashRouter",
    "SigmoidRouter",
    "SinkhornRouter",
    "SparseMixerRouter",
    "SwitchRouter",
    "Top2Router",
    "TopKRouter",
]
