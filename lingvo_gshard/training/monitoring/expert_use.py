"""Which experts a trained model uses for what, measured layer by layer on given batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.monitoring.metric_vector import metric_vector

_OBSERVED = ("load", "gate", "tokens", "slots")
_METRICS = ("dropped_share", "router_entropy")


@dataclasses.dataclass
class ExpertUse:
    """What one layer's experts did over some batches; sums, from which the properties follow.

    load: tokens that each expert kept, [E]. gate: the sum of the gates its outputs for them were
    weighted by, [E]. tokens: real tokens that came. places: room there was. entropy: None where the
    router has no gates over all experts.
    """

    load: np.ndarray
    gate: np.ndarray
    tokens: float
    slots: float
    dropped: float
    entropy_sum: float | None

    @property
    def shares(self) -> np.ndarray:
        """Each expert's share of what all kept, [E]."""
        return self.load / max(self.load.sum(), 1.0)

    @property
    def utilization(self) -> float:
        """Of the places there were, the share taken."""
        return float(self.load.sum() / max(self.slots, 1.0))

    @property
    def largest_violation(self) -> float:
        """The largest load over the mean one, less 1; 0: even."""
        return float(self.shares.max() * len(self.load) - 1.0)

    @property
    def dropped_share(self) -> float:
        """Of the places that tokens asked for, the share not given."""
        return self.dropped / max(self.tokens, 1.0)

    @property
    def dead_experts(self) -> int:
        """How many experts kept no token."""
        return int(np.count_nonzero(self.load == 0))

    @property
    def router_entropy(self) -> float | None:
        """The mean over tokens of the entropy of their gates, in nats."""
        return None if self.entropy_sum is None else self.entropy_sum / max(self.tokens, 1.0)

    def __add__(self, other: ExpertUse) -> ExpertUse:
        """The use over both."""
        mine, theirs = vars(self).items(), vars(other).values()
        pairs = zip(mine, theirs, strict=True)
        return ExpertUse(
            **{name: None if a is None or b is None else a + b for (name, a), b in pairs}
        )


def measure(
    task: Layer,
    theta: NestedMap,
    batches: Iterable[dict[str, np.ndarray]],
    on_batch: Callable[[dict[str, np.ndarray]], None] | None = None,
) -> dict[str, ExpertUse]:
    """Returns the use of the experts by the path of their layer, in evaluation.

    Layers run one by one, those of a loop, too, which go by the names that they have without it.
    on_batch: called with each batch when it is done. Empty where the task has no experts.
    """
    found: dict[str, ExpertUse] = {}
    theta = theta.transform(tf.convert_to_tensor)
    for batch in batches:
        tensors = {name: tf.convert_to_tensor(value) for name, value in batch.items()}
        for path, use in _of_batch(task, theta, tensors).items():
            found[path] = found[path] + use if path in found else use
        if on_batch:
            on_batch(batch)
    return found


def _of_batch(task: Layer, theta: NestedMap, batch: dict[str, tf.Tensor]) -> dict[str, ExpertUse]:
    seen: dict[str, np.ndarray] = {}

    def look(path: str, value: tf.Tensor) -> None:
        _, _, name = path.partition("/")
        if name in _OBSERVED:
            seen[path] = np.float64(value.numpy())

    with context.scope(training=False, on_output=look) as scope:
        task.loss(theta, batch)
    layers = [path.removesuffix("/load") for path in seen if path.endswith("/load")]
    names, values = metric_vector((name, value) for name, (value, _) in scope.metrics.items())
    metrics = dict(zip(names, values.numpy().tolist(), strict=True))
    return {layer: _use(layer, seen, metrics) for layer in layers}


def _use(layer: str, seen: dict[str, np.ndarray], metrics: dict[str, float]) -> ExpertUse:
    load, gate, tokens, slots = (seen[f"{layer}/{name}"] for name in _OBSERVED)

    def over_tokens(name: str) -> float | None:
        metric = metrics.get(f"{layer}/{name}")
        return None if metric is None else metric * float(tokens)

    dropped, entropy = (over_tokens(name) for name in _METRICS)
    return ExpertUse(load, gate, float(tokens), float(slots), dropped, entropy)
