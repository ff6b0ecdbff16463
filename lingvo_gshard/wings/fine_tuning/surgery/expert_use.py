"""Measures how much a trained model uses each of its experts on given batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from lingvo_gshard.core import Layer, NestedMap, context, tf
from lingvo_gshard.training import metric_vector

_OBSERVED = ("load", "gate", "tokens", "slots")
_METRICS = ("dropped_share", "router_entropy")


@dataclasses.dataclass
class ExpertUse:
    """The use of one layer's experts, summed over batches.

    Attributes:
      load: [E], tokens that each expert kept.
      gate: [E], sum of the gates of these tokens.
      tokens: real tokens that the layer got.
      slots: capacity slots.
      dropped: dropped share of each batch times its tokens.
      entropy_sum: sum over tokens of the entropy of their gates, in nats; None if the router has no
        gates over all experts.
    """

    load: np.ndarray
    gate: np.ndarray
    tokens: float
    slots: float
    dropped: float
    entropy_sum: float | None

    @property
    def shares(self) -> np.ndarray:
        """[E], each expert's share of the kept tokens."""
        return self.load / max(self.load.sum(), 1.0)

    @property
    def utilization(self) -> float:
        """Share of the capacity slots that held a token."""
        return float(self.load.sum() / max(self.slots, 1.0))

    @property
    def largest_violation(self) -> float:
        """The largest load over the mean load, minus 1; 0 is even."""
        return float(self.shares.max() * len(self.load) - 1.0)

    @property
    def dropped_share(self) -> float:
        """Share of the requested capacity slots that were full."""
        return self.dropped / max(self.tokens, 1.0)

    @property
    def dead_experts(self) -> int:
        """The number of experts that kept no token."""
        return int(np.count_nonzero(self.load == 0))

    @property
    def router_entropy(self) -> float | None:
        """The mean entropy of a token's gates, in nats; None if unknown."""
        return None if self.entropy_sum is None else self.entropy_sum / max(self.tokens, 1.0)

    def __add__(self, other: ExpertUse) -> ExpertUse:
        """Returns the use over the batches of both."""
        mine, theirs = vars(self).items(), vars(other).values()
        pairs = zip(mine, theirs, strict=True)
        summed: dict[str, Any] = {
            name: None if a is None or b is None else a + b for (name, a), b in pairs
        }
        return ExpertUse(**summed)


def measure(
    task: Layer,
    theta: NestedMap,
    batches: Iterable[dict[str, np.ndarray]],
    on_batch: Callable[[dict[str, np.ndarray]], None] | None = None,
) -> dict[str, ExpertUse]:
    """Returns the use of the experts by the path of their layer, in evaluation.

    Layers of a compiled loop have the paths that they have without the loop. The result is empty if
    the task has no experts. `on_batch` is called with each batch after it was evaluated.
    """
    found: dict[str, ExpertUse] = {}
    theta = theta.transform(tf.convert_to_tensor)
    for batch in batches:
        tensors = {name: tf.convert_to_tensor(value) for name, value in batch.items()}
        for path, use in _measure_batch(task, theta, tensors).items():
            found[path] = found[path] + use if path in found else use
        if on_batch:
            on_batch(batch)
    return found


def _measure_batch(
    task: Layer, theta: NestedMap, batch: dict[str, tf.Tensor]
) -> dict[str, ExpertUse]:
    seen: dict[str, np.ndarray] = {}

    def observe(path: str, value: tf.Tensor) -> None:
        _, _, name = path.partition("/")
        if name in _OBSERVED:
            seen[path] = np.asarray(value.numpy(), np.float64)

    with context.scope(training=False, on_output=observe) as scope:
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
    return ExpertUse(load, gate, float(tokens), float(slots), dropped or 0.0, entropy)
