"""Mixture of experts: a router chooses, dispatch carries, experts compute, combine brings back."""

from lingvo_gshard.layers.moe.layer import MixtureOfExperts
from lingvo_gshard.layers.moe.routers import (
    ExpertChoiceRouter,
    ForcedBalanceRouter,
    HashRouter,
    SigmoidRouter,
    SinkhornRouter,
    SwitchRouter,
    Top2Router,
    TopKRouter,
)

__all__ = [
    "ExpertChoiceRouter",
    "ForcedBalanceRouter",
    "HashRouter",
    "MixtureOfExperts",
    "SigmoidRouter",
    "SinkhornRouter",
    "SwitchRouter",
    "Top2Router",
    "TopKRouter",
]
