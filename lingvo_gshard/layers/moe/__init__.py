"""Mixture of experts: a router chooses, dispatch carries, experts compute, combine brings back."""

from lingvo_gshard.layers.moe.layer import MixtureOfExperts
from lingvo_gshard.layers.moe.routers import Top2Router

__all__ = ["MixtureOfExperts", "Top2Router"]
