"""Mixture of experts: a router, a dispatch, an exchange between devices, and the experts."""

from lingvo_gshard.layers.moe.dispatches import EinsumDispatch, GatherDispatch
from lingvo_gshard.layers.moe.layer import MixtureOfExperts
from lingvo_gshard.layers.moe.routers import (
    SwitchRouter,
    Top2Router,
    TopKRouter,
)

__all__ = [
    "EinsumDispatch",
    "GatherDispatch",
    "MixtureOfExperts",
    "SwitchRouter",
    "Top2Router",
    "TopKRouter",
]
