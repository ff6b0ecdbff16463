"""Mixture of experts: a router, a dispatch, an exchange between devices, and the experts."""

from lingvo_gshard.layers.moe.dispatches import EinsumDispatch as EinsumDispatch
from lingvo_gshard.layers.moe.dispatches import GatherDispatch as GatherDispatch
from lingvo_gshard.layers.moe.layer import MixtureOfExperts as MixtureOfExperts
from lingvo_gshard.layers.moe.routers import SwitchRouter as SwitchRouter
from lingvo_gshard.layers.moe.routers import Top2Router as Top2Router
from lingvo_gshard.layers.moe.routers import TopKRouter as TopKRouter
