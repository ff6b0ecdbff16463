"""Finds which recorded tensor a tensor of the traced graph was computed from."""

from __future__ import annotations

from collections.abc import Mapping

from lingvo_gshard.core.lazy import tf

# A norm's mean over the model dimension: its result is another tensor than its input.
_SUMS = frozenset(("Mean",))
_LOOPS = frozenset(("While", "StatelessWhile"))
_GATHERS = frozenset(("GatherV2",))


class UpstreamFinder:
    """Finds the nearest recorded tensor upstream of a tensor.

    Args:
      recorded: index of each recorded tensor in the order of the trace, by the tensor's id.
      last_of: index of the last recorded tensor of each graph, by the graph's name. The results of
        a loop come from the last tensor of its body.
    """

    def __init__(self, recorded: Mapping[int, int], last_of: Mapping[str, int] | None = None):
        self._recorded, self._last_of = recorded, last_of or {}
        self._nearest: dict[int, tuple[int, bool] | None] = {}

    def nearest(self, tensor: tf.Tensor) -> tuple[int, bool] | None:
        """Returns the nearest recorded tensor, which may be `tensor` itself; None if there is none.

        If a tensor is computed from several recorded ones, the last counts: a residual stream comes
        from the layer that added to it last. A lookup comes from its table. An argument of a loop's
        body comes from nothing.

        Returns:
          The recorded tensor's index, and whether it is reached without a norm's mean or a loop.
        """
        if id(tensor) in self._recorded:
            return self._recorded[id(tensor)], True
        return self.before(tensor)

    def before(self, tensor: tf.Tensor) -> tuple[int, bool] | None:
        """Returns the nearest recorded tensor other than `tensor`; see `nearest`."""
        pending = [tensor]
        while pending:
            top = pending[-1]
            if id(top) in self._nearest:
                pending.pop()
                continue
            inputs = _inputs(top)
            missing = [
                x for x in inputs if id(x) not in self._recorded and id(x) not in self._nearest
            ]
            if missing:
                pending.extend(missing)
                continue
            self._nearest[id(top)] = self._last(top, inputs)
            pending.pop()
        return self._nearest[id(tensor)]

    def _last(self, tensor: tf.Tensor, inputs: list[tf.Tensor]) -> tuple[int, bool] | None:
        sources = [
            (self._recorded[id(x)], True) if id(x) in self._recorded else self._nearest[id(x)]
            for x in inputs
        ]
        sources = [source for source in sources if source is not None]
        if tensor.op.type in _LOOPS:
            last = self._last_of.get(tensor.op.get_attr("body").name)
            if last is not None:
                return last, False
        if not sources:
            return None
        last = max(number for number, _ in sources)
        is_direct = all(direct for number, direct in sources if number == last)
        return last, is_direct and tensor.op.type not in _SUMS


def _inputs(tensor: tf.Tensor) -> list[tf.Tensor]:
    inputs = list(tensor.op.inputs)
    return inputs[:1] if tensor.op.type in _GATHERS else inputs
