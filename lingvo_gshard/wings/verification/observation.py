"""Collects the results of layers while a function is traced, also inside of compiled loops."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from lingvo_gshard.core import Iteration, context, jax, tf
from lingvo_gshard.layers import token_context
from lingvo_gshard.sharding import current_sharding

# Methods whose results are weights, or are compared as loss and metrics.
_NOT_OUTPUTS = ("unrolled", "loss")
# Random projections of a tensor that is computed inside of a loop.
PROJECTIONS = 3
_DIGEST = re.compile(r"^(.*) digest (\d+)(.*)$")


@dataclasses.dataclass(frozen=True)
class Observed:
    """A result of a layer.

    Attributes:
      name: path of the layer, followed by the method if that is not fprop.
      order: sorts results by the time of their computation.
      groups: the order of the tensor's groups of tokens; None if the groups are stored by number.
      is_digest: whether its value is a digest of the tensor, which is computed inside of a loop.
    """

    name: str
    layer: str
    order: tuple[int, int, int]
    tensor: tf.Tensor
    groups: token_context.GroupOrder | None = None
    is_digest: bool = False

    def like(self, other: Observed, value: np.ndarray | jax.Array) -> np.ndarray:
        """Returns the value of another computation's result, with groups in this one's order."""
        if other.groups:
            value = np.take(value, np.argsort(other.groups.numbers), other.groups.dimension)
        if self.groups:
            value = np.take(value, self.groups.numbers, self.groups.dimension)
        return np.asarray(value)


class Observation:
    """Collects the results of the layers of one function while it is traced.

    Make it when tracing begins. A tensor of the function's own graph is kept as it is. A tensor of
    a loop cannot leave the loop's graph. Random projections and the mean square of such a tensor
    are reported as metrics, and loops stack metrics over their iterations. These metrics are sums
    over elements, so they are equal on all meshes.

    Args:
      with_loops: whether to report results of loops. Their caller must take the metrics.
    """

    def __init__(self, with_loops: bool = True):
        self._with_loops = with_loops
        self._graph = tf.compat.v1.get_default_graph()
        self._whole: dict[str, Observed] = {}
        self._in_loops: dict[str, Observed] = {}
        self._count = 0
        self._loop: tuple[object, int] = (None, 0)

    @property
    def whole(self) -> list[Observed]:
        """The results that are tensors of the function's graph."""
        return list(self._whole.values())

    def on_result(self, path: str, method: str, result: Any) -> None:
        """Records the result of a layer's method, for comparison; see `context.Context`."""
        if method in _NOT_OUTPUTS or method.startswith("_"):
            return
        if current_sharding().manual_partitioning is not None:
            # One device's shards have no counterpart in the whole computation.
            return
        found = tf.nest.flatten(_plain(result))
        tensors = [x for x in found if x.dtype.is_floating and x.shape.num_elements()]
        layer = path.partition("/")[0]
        for index, tensor in enumerate(tensors):
            name = path if method in ("fprop", "add_loss") else f"{path or 'task'}/{method}"
            self._take(layer, f"{name}[{index}]" if len(tensors) > 1 else name, tensor)

    def split_metrics(
        self, metrics: dict[str, context.Metric]
    ) -> tuple[dict[str, context.Metric], dict[str, context.Metric]]:
        """Returns the metrics of the model, and the digests of results inside of loops."""
        digests = {name: pair for name, pair in metrics.items() if _DIGEST.match(name)}
        return {name: pair for name, pair in metrics.items() if name not in digests}, digests

    def digests(self, values: dict[str, float]) -> list[tuple[Observed, np.ndarray]]:
        """Returns the digest of each result in loops: its projections and its mean square."""
        found: dict[str, list[float]] = {}
        for name, value in values.items():
            match = _DIGEST.match(name)
            assert match is not None
            found.setdefault(match[1] + match[3], []).append(value)
        return [(self._observed(name), np.array(numbers)) for name, numbers in found.items()]

    def _observed(self, name: str) -> Observed:
        # A method that is called several times in one iteration is numbered.
        known = self._in_loops.get(name) or self._in_loops[re.sub(r"_\d+$", "", name)]
        return dataclasses.replace(known, name=name)

    def _take(self, layer: str, name: str, tensor: tf.Tensor) -> None:
        now = context.current()
        if tensor.graph is self._graph:
            if not now.is_recomputing:
                self._count += 1
                name = _unused(name, self._whole)
                order, groups = (self._count, 0, 0), _group_order(tensor)
                self._whole[name] = Observed(name, layer, order, tensor, groups)
            return
        if not self._with_loops:
            return
        # A unit that is computed again must report what it reported before.
        for index, value in enumerate(_digest(tensor, _group_order(tensor))):
            now.add_metric(f"{name} digest {index}", value)
        if not now.is_recomputing:
            self._remember(layer, name, tensor, now.iteration)

    def _remember(
        self, layer: str, name: str, tensor: tf.Tensor, iteration: Iteration | None
    ) -> None:
        """Keeps where the result of a loop stands among the others."""
        self._count += 1
        if iteration is None:
            order = (self._count, 0, 0)
            self._in_loops.setdefault(name, Observed(name, layer, order, tensor, is_digest=True))
            return
        if self._loop[0] is not iteration.repetition:
            self._loop = (iteration.repetition, self._count)
        loop = iteration.repetition
        names, layers = loop.paths(name), loop.paths(layer)
        if names[0] == name and loop.times > 1:
            names = [f"{name}[{r}]" for r in range(loop.times)]
        for r, (one, path) in enumerate(zip(names, layers, strict=True)):
            order = (self._loop[1], r, self._count)
            self._in_loops.setdefault(one, Observed(one, path, order, tensor, is_digest=True))


def _group_order(tensor: tf.Tensor) -> token_context.GroupOrder | None:
    """Returns the order of the groups of a tensor that was just computed; None without groups."""
    order = token_context.current().group_order
    if order is None or tensor.shape.rank < 2:
        return None
    return order if tensor.shape[order.dimension] == len(order.numbers) else None


def _digest(tensor: tf.Tensor, groups: token_context.GroupOrder | None) -> list[tf.Tensor]:
    """Returns random projections of a tensor and its mean square, float32 scalars.

    The difference of two projections has the expected square of the difference of the tensors.
    """
    x = tf.stop_gradient(tf.cast(tensor, tf.float32))
    size = x.shape.num_elements()
    rng = np.random.default_rng(size)
    signs = [
        rng.choice(np.asarray([-1, 1], np.float32), x.shape.as_list()) for _ in range(PROJECTIONS)
    ]
    if groups:
        signs = [np.take(each, groups.numbers, groups.dimension) for each in signs]
    projections = [tf.reduce_sum(x * tf.constant(s)) / size**0.5 for s in signs]
    return [*projections, tf.reduce_mean(tf.square(x))]


def _plain(result: Any) -> Any:
    """Returns the part of a result that consists of tensors in tuples, lists and dicts."""
    if isinstance(result, (list, tuple)):
        return [_plain(x) for x in result]
    if isinstance(result, dict):
        return [_plain(result[key]) for key in sorted(result)]
    return result if isinstance(result, tf.Tensor) else []


def _unused(name: str, taken: dict) -> str:
    if name not in taken:
        return name
    return next(f"{name}_{i}" for i in range(1, len(taken) + 2) if f"{name}_{i}" not in taken)
