"""Short names of dispatches for test cases."""

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.moe import EinsumDispatch, GatherDispatch
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch

# The dispatches that fill buffers, which support every routing.
BUFFER_DISPATCHES = {"gather": GatherDispatch, "einsum": EinsumDispatch}
DISPATCHES = {**BUFFER_DISPATCHES, "dropless": DroplessDispatch}


def dispatch_params(name: str) -> Params:
    """Returns the default Params of a dispatch."""
    return DISPATCHES[name].params()
