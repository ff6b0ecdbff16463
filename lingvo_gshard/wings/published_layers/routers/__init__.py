"""Routers of published models, and one for benchmarks."""

from lingvo_gshard.wings.published_layers.routers.forced_balance import ForcedBalanceRouter
from lingvo_gshard.wings.published_layers.routers.sigmoid import BiasedSoftmaxRouter, SigmoidRouter
from lingvo_gshard.wings.published_layers.routers.sinkhorn import SinkhornRouter
from lingvo_gshard.wings.published_layers.routers.sparse_mixer import SparseMixerRouter

__all__ = [
    "BiasedSoftmaxRouter",
    "ForcedBalanceRouter",
    "SigmoidRouter",
    "SinkhornRouter",
    "SparseMixerRouter",
]
