"""Routers of published models and of other papers, and one for benchmarks."""

from lingvo_gshard.wings.published_layers.routers.expert_choice import ExpertChoiceRouter
from lingvo_gshard.wings.published_layers.routers.forced_balance import ForcedBalanceRouter
from lingvo_gshard.wings.published_layers.routers.group_limited import GroupLimitedRouter
from lingvo_gshard.wings.published_layers.routers.hashed import HashRouter
from lingvo_gshard.wings.published_layers.routers.looked_up import LookupRouter, SoftplusRouter
from lingvo_gshard.wings.published_layers.routers.sigmoid import BiasedSoftmaxRouter, SigmoidRouter
from lingvo_gshard.wings.published_layers.routers.sinkhorn import SinkhornRouter
from lingvo_gshard.wings.published_layers.routers.sparse_mixer import SparseMixerRouter

__all__ = [
    "BiasedSoftmaxRouter",
    "ExpertChoiceRouter",
    "ForcedBalanceRouter",
    "GroupLimitedRouter",
    "HashRouter",
    "LookupRouter",
    "SigmoidRouter",
    "SinkhornRouter",
    "SoftplusRouter",
    "SparseMixerRouter",
]
