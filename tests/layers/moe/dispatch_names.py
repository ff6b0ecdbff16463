"""The dispatches by short names, for test cases."""

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.moe import DroplessDispatch, EinsumDispatch, GatherDispatch

# All that fill buffers, which any routing can use.
BUFFER_DISPATCHES = {"gather": GatherDispatch, "einsum": EinsumDispatch}
DISPATCHES = {**BUFFER_DISPATCHES, "dropless": DroplessDispatch}


def dispatch_params(name: str) -> Params:
    """Returns the default Params of a dispatch."""
    return DISPATCHES[name].params()
