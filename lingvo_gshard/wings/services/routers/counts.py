"""Makes records of the sums that watched routers report.

A separate program runs it on the batch of a step, before the step, with the same weights and random
numbers. The training step itself stays as it is. XLA leaves out what no router depends on: the
experts of the last layer, the softmax and the loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import Layer, NestedMap, TokenKinds, context, tf, unstacked
from lingvo_gshard.data import Batch
from lingvo_gshard.layers import Execution, MixtureOfExperts, token_context
from lingvo_gshard.training import ReadMeasured, Runtime, TensorBatch, Trainer
from lingvo_gshard.wings.optimizers.micro_batches import sum_over_parts
from lingvo_gshard.wings.services.routers.router_records import OTHERS, RouterRecord
from lingvo_gshard.wings.services.routers.sums import WatchedKinds

# A record holds at most this many counts by language, and at most this many by class.
_MOST_COUNTS = 4096


def watched_layers(layer: Layer) -> dict[str, MixtureOfExperts]:
    """Returns the layers with experts by path, in the order of their names in the model.

    Layers of a loop have the paths that they have without the loop.
    """
    found = {layer.path: layer} if isinstance(layer, MixtureOfExperts) else {}
    for child in layer.child_layers():
        found |= watched_layers(child)
    if isinstance(layer, Execution):
        of_path = {path: layer.repetition.paths(path) for path in found}
        found = {
            of_path[path][r]: moe
            for r in range(layer.repetition.times)
            for path, moe in found.items()
        }
    return found


def records_of(
    step: int,
    sums: Mapping[str, np.ndarray],
    layers: Mapping[str, MixtureOfExperts],
    kinds: TokenKinds | None,
) -> list[RouterRecord]:
    """Returns a record for each layer, without `dead_since`, of what `RoutingSums` returned."""
    by_layer: dict[str, dict[str, np.ndarray]] = {path: {} for path in layers}
    for name, value in sums.items():
        path, _, what = name.rpartition("/")
        if path in by_layer:
            by_layer[path][what] = value
            continue
        for one, part in zip(unstacked(name, len(value)), value, strict=True):
            by_layer[one.rpartition("/")[0]][what] = part
    return [
        _record(step, path, layers[path], found, kinds) for path, found in by_layer.items() if found
    ]


def _record(
    step: int,
    path: str,
    layer: MixtureOfExperts,
    sums: Mapping[str, np.ndarray],
    kinds: TokenKinds | None,
) -> RouterRecord:
    tokens, requests, met = sums["tokens"].tolist()
    met -= float(sums.get("over_bound", 0.0))
    choices = _integers(sums["choices"])
    router = layer.router
    groups, group_tokens, slots = sums["groups"].astype(np.float64)
    return RouterRecord(
        step=step,
        layer=path,
        router=type(router).__name__,
        experts_per_token=float(router.experts_per_token(router.p)),
        tokens=round(tokens),
        choices=choices.tolist(),
        kept=_integers(sums["kept"]).tolist(),
        dropped_share=1.0 - met / max(requests, 1.0),
        load_entropy=entropy(choices),
        token_entropy=_quotient(sums.get("entropy"), tokens),
        balance_loss=_quotient(sums.get("balance"), float(sums["batches"])),
        balance_floor=router.balance_floor if "balance" in sums else None,
        groups=round(groups),
        group_size=round(group_tokens / groups),
        capacity=round(slots / groups / len(choices)),
        positions=np.trim_zeros(_integers(sums.get("positions", np.zeros(0))), "b").tolist(),
        by_part=_integers(sums["by_part"]).tolist(),
        by_language=_by_name(kinds.languages if kinds else (), sums.get("by_language")),
        by_class=_by_name(kinds.classes if kinds else (), sums.get("by_class")),
    )


def entropy(counts: np.ndarray) -> float:
    """Returns the entropy of the shares of counts, in nats; 0 if all are 0."""
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return abs(float(shares @ np.log(shares)))


def _quotient(total: np.ndarray | None, count: float) -> float | None:
    """Returns a mean; None without a total, or if it is not finite."""
    mean = math.nan if total is None else float(total) / max(count, 1.0)
    return mean if math.isfinite(mean) else None


def _integers(counts: np.ndarray) -> np.ndarray:
    return np.rint(counts).astype(np.int64)


def _by_name(names: Sequence[str], counts: np.ndarray | None) -> dict[str, list[int]]:
    """Returns the counts of each name that has any, [E].

    If they are too many for a record, the smallest names are summed under OTHERS.
    """
    if counts is None:
        return {}
    table = _integers(counts)
    most = max(_MOST_COUNTS // table.shape[1], 2)
    order = np.argsort(-table.sum(1), kind="stable")
    shown = [int(i) for i in order if table[i].any()]
    if len(shown) > most:
        rest = table[shown[most - 1 :]].sum(0)
        shown = shown[: most - 1]
        return {names[i]: table[i].tolist() for i in sorted(shown)} | {OTHERS: rest.tolist()}
    return {names[i]: table[i].tolist() for i in sorted(shown)}


# Name of the number of the step among the arrays of a watched batch.
_STEP = "watched_step"


def watched_batch(batch: Batch, kinds: TokenKinds | None, step: int) -> tuple[WatchedKinds, Batch]:
    """Returns the numbers of kinds, and all arrays that `RoutingSums` reads; steps begin at 1."""
    arrays = kinds.arrays if kinds else {}
    sizes = (len(kinds.languages), len(kinds.classes)) if kinds else (0, 0)
    return WatchedKinds(*sizes), {**batch, **arrays, _STEP: np.asarray(step, np.int32)}


@dataclasses.dataclass(frozen=True)
class RoutingSums:
    """The forward pass of a training step that watches the routers, as a runtime measures it.

    It has the weights before the step, the step's random numbers and the capacity of training.

    Attributes:
      kinds: the numbers of kinds that `watched_batch` returned.
    """

    trainer: Trainer
    kinds: WatchedKinds

    def __call__(self, theta: NestedMap, batch: TensorBatch) -> dict[str, tf.Tensor]:
        """Returns what the watched routers report, summed over micro-batches.

        Returns:
          `<path of the layer>/<name>` -> float32 tensor, with the names of `watched_sums`. Layers
          of a loop have one stacked tensor, under a name that `repetition.unstacked` expands.
        """
        return sums_of_step(self.trainer, theta, batch, {"on_routing": self.kinds.count})


def sums_of_step(
    trainer: Trainer, theta: NestedMap, batch: TensorBatch, watch: Mapping[str, Any]
) -> dict[str, tf.Tensor]:
    """Returns what layers report as sums in the forward pass of a step, over its micro-batches."""
    features = dict(batch)
    step = features.pop(_STEP)
    key = tf.stack([tf.constant(trainer.p.seed & 0x7FFFFFFF, tf.int32), step])
    theta = trainer.layer_weights(theta)

    def compute(part: TensorBatch, key: tf.Tensor) -> dict[str, tf.Tensor]:
        with (
            context.use(trainer.gradients.context(key)) as passing,
            trainer.gradients.around(part),
            token_context.override(**watch),
        ):
            trainer.task.loss(theta, part)
        return passing.sums

    return sum_over_parts(compute, features, key, trainer.p.micro_batches)


def watch_routers(
    runtime: Runtime, trainer: Trainer, batch: Batch, kinds: TokenKinds | None, step: int
) -> ReadMeasured:
    """Starts `RoutingSums` with the weights before a step. Call it before this step."""
    sizes, arrays = watched_batch(batch, kinds, step)
    return runtime.measure("routers", RoutingSums(trainer, sizes), arrays)
