"""Ancestry: which recorded tensors another one was computed from, through the traced graph."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

# A sum over the model dimension, as norms have it: the tensor before it is another than after.
_SUMS = frozenset(("Mean",))
_LOOPS = frozenset(("While", "StatelessWhile"))
_GATHERS = frozenset(("GatherV2",))


class Ancestry:
    """Finds, for tensors of one trace, the nearest recorded ones that they come from.

    recorded: id of a recorded tensor -> its number, in the order of the trace. last_of: name of a
    graph -> the last number in it; of what a loop returns that of its body is the nearest.
    """

    def __init__(self, recorded: Mapping[int, int], last_of: Mapping[str, int] | None = None):
        self._recorded, self._last_of = recorded, last_of or {}
        self._known: dict[int, tuple[int, bool] | None] = {}

    def nearest(self, tensor: tf.Tensor) -> tuple[int, bool] | None:
        """Returns the number of a recorded tensor, its own if it is, and whether no sum is between.

        Of several that are added or multiplied the last one recorded counts: a residual stream is
        handed on by the layer that added to it last. Of a lookup it is the table. None if there
        is none, as for what a loop's body is given.
        """
        if id(tensor) in self._recorded:
            return self._recorded[id(tensor)], True
        return self.before(tensor)

    def before(self, tensor: tf.Tensor) -> tuple[int, bool] | None:
        """Returns the same, but never the tensor's own number."""
        pending = [tensor]
        while pending:
            top = pending[-1]
            if id(top) in self._known:
                pending.pop()
                continue
            inputs = _inputs(top)
            missing = [
                x for x in inputs if id(x) not in self._recorded and id(x) not in self._known
            ]
            if missing:
                pending.extend(missing)
                continue
            self._known[id(top)] = self._last(top, inputs)
            pending.pop()
        return self._known[id(tensor)]

    def _last(self, tensor: tf.Tensor, inputs: list[tf.Tensor]) -> tuple[int, bool] | None:
        found = [
            (self._recorded[id(x)], True) if id(x) in self._recorded else self._known[id(x)]
            for x in inputs
        ]
        found = [f for f in found if f is not None]
        if tensor.op.type in _LOOPS:
            last = self._last_of.get(tensor.op.get_attr("body").name)
            if last is not None:
                return last, False
        if not found:
            return None
        last = max(number for number, _ in found)
        is_direct = all(direct for number, direct in found if number == last)
        return last, is_direct and tensor.op.type not in _SUMS


def _inputs(tensor: tf.Tensor) -> list[tf.Tensor]:
    inputs = list(tensor.op.inputs)
    return inputs[:1] if tensor.op.type in _GATHERS else inputs
