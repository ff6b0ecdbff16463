"""Ways to bring tokens to experts and their outputs back, by name."""

import tensorflow as tf

from lingvo_gshard.core.config import names
from lingvo_gshard.layers.moe.dispatches.dispatch import Dispatch
from lingvo_gshard.layers.moe.dispatches.dropless import DroplessDispatch
from lingvo_gshard.layers.moe.dispatches.gather import GatherDispatch
from lingvo_gshard.layers.moe.dispatches.one_hot import EinsumDispatch
from lingvo_gshard.layers.moe.dispatches.slots import SlotEinsumDispatch, SlotGatherDispatch
from lingvo_gshard.layers.moe.routing import Routing, SlotRouting

DISPATCHES: dict[str, type[Dispatch]] = {
    "gather": GatherDispatch,
    "einsum": EinsumDispatch,
    "dropless": DroplessDispatch,
}
# Of those, the ones that know a routing in which experts choose tokens.
SLOT_DISPATCHES: dict[str, type[Dispatch]] = {
    "gather": SlotGatherDispatch,
    "einsum": SlotEinsumDispatch,
}


def get(name: str, path: str) -> type[Dispatch]:
    """Returns the dispatch of that name; ValueError naming the layer's path if there is none."""
    if name not in DISPATCHES:
        raise ValueError(
            f"{path}.dispatch: unknown dispatch {name!r}. {names.nearest(name, DISPATCHES)}"
        )
    return DISPATCHES[name]


def make(
    name: str, routing: Routing | SlotRouting, dtype: tf.DType, bound: float = 0.0
) -> Dispatch:
    """Returns the dispatch of that name for one routing of whichever kind.

    bound: as in DroplessDispatch, for which it is.
    """
    if name == "dropless":
        return DroplessDispatch(routing, dtype, bound)
    table = SLOT_DISPATCHES if isinstance(routing, SlotRouting) else DISPATCHES
    return table[name](routing, dtype)
