"""Ways to bring tokens to experts and their outputs back, by name."""

from lingvo_gshard.core import names
from lingvo_gshard.layers.moe.dispatches.dispatch import Dispatch
from lingvo_gshard.layers.moe.dispatches.gather import GatherDispatch
from lingvo_gshard.layers.moe.dispatches.one_hot import EinsumDispatch

DISPATCHES: dict[str, type[Dispatch]] = {"gather": GatherDispatch, "einsum": EinsumDispatch}


def get(name: str, path: str) -> type[Dispatch]:
    """Returns the dispatch of that name; ValueError naming the layer's path if there is none."""
    if name not in DISPATCHES:
        raise ValueError(
            f"{path}.dispatch: unknown dispatch {name!r}. {names.nearest(name, DISPATCHES)}"
        )
    return DISPATCHES[name]
