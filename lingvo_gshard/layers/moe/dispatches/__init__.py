"""Dispatches: send tokens to their experts and combine the experts' outputs."""

from lingvo_gshard.layers.moe.dispatches.dispatch import Dispatch as Dispatch
from lingvo_gshard.layers.moe.dispatches.einsum import EinsumDispatch as EinsumDispatch
from lingvo_gshard.layers.moe.dispatches.gather import GatherDispatch as GatherDispatch
