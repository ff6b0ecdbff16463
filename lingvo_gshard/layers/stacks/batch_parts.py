"""Parts of a batch that a stack computes separately, and what layers report of them.

The result for a part equals the result of applying the layers to it alone. Experts are routed
within a part, losses and metrics join as their reports declare, and every part draws its own random
numbers, as with `step.micro_batches`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lingvo_gshard.core import Layer, NestedMap, context, random_numbers, tf
from lingvo_gshard.core.autodiff.remat_unit import Reports
from lingvo_gshard.layers import measured, token_context
from lingvo_gshard.sharding import annotate


class PartInputs(NamedTuple):
    """Inputs of the layers other than the activations.

    Attributes:
      shared: nests of tensors that every layer is called with.
      tokens: ids, kinds and choices of the tokens of the context, by field, as far as it has them.
    """

    shared: tuple
    tokens: dict[str, Any]

    @classmethod
    def of(cls, shared: tuple) -> PartInputs:
        """Returns the inputs of layers that are called with `shared` in the current context."""
        now = token_context.current()
        given = {"ids": now.ids, "kinds": now.kinds, "choices": now.choices}
        return cls(shared, {name: value for name, value in given.items() if value is not None})

    @contextlib.contextmanager
    def in_use(self, part: tf.Tensor | int) -> Iterator[None]:
        """Has the current context the tokens of a part, and random numbers of its own."""
        now = context.current()
        if now.seed is not None:
            seed = random_numbers.hashed_fold_in_word(now.seed, part)
            now = dataclasses.replace(now, seed=seed)
        with context.use(now), token_context.override(**self.tokens):
            yield


def add_reports(
    target: context.Context, reports: Reports, values: Sequence[tf.Tensor], axis: int
) -> None:
    """Adds the reports on all parts to a context, joined as they declare.

    Args:
      values: ordered as in `Reports`, each with a dimension of the parts.
      axis: this dimension.
    """
    losses, loss_weights, metrics, weights, sums = reports.split(values)
    joined = [
        tf.reduce_sum(loss, axis) if name in reports.summed_losses else _mean(loss, weight, axis)
        for name, loss, weight in zip(reports.losses, losses, loss_weights, strict=True)
    ]
    joined += [tf.reduce_sum(weight, axis) for weight in loss_weights]
    joined += [_mean(*pair, axis) for pair in zip(metrics, weights, strict=True)]
    reports.add_to(target, [*joined, *(tf.reduce_sum(x, axis) for x in (*weights, *sums))])


def _mean(value: tf.Tensor, weight: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the mean by a weight over a dimension; 0 where nothing weighs anything."""
    total = tf.reduce_sum(value * weight, axis)
    return tf.math.divide_no_nan(total, tf.reduce_sum(weight, axis))


def run_interleaved(
    layers: Sequence[tuple[Layer, NestedMap]], x_BLM: tf.Tensor, shared: tuple, parts: int
) -> tf.Tensor:
    """Returns [B,L,M]: x through layers. Each layer computes one part after the other.

    No part waits for another, so the compiler runs the collectives of one under the computation of
    another.

    Args:
      layers: the layers with their weights.
      shared: nests of tensors with B rows that every layer reads.
      parts: number of parts, which divides B. Part i has the rows i, i + parts, and so on, so that
        each device contributes equally to every part.
    """
    inputs = PartInputs.of(shared)
    split = [_rows_of_parts(x, parts) for x in tf.nest.flatten((x_BLM, inputs))]
    by_part = [tf.nest.pack_sequence_as((x_BLM, inputs), part) for part in zip(*split, strict=True)]
    activations = [x for x, _ in by_part]
    now = context.current()
    collected = [now.part(now.iteration) for _ in by_part]
    for layer, theta in layers:
        weights = measured.for_parts(layer, theta, parts)
        for i, (_, own) in enumerate(by_part):
            with context.use(collected[i]), own.in_use(i):
                y_BLM = layer.fprop(weights[i], annotate(activations[i], "BLM"), *own.shared)
                activations[i] = annotate(y_BLM, "BLM")
    reports = [Reports.of(each) for each in collected]
    values = [tf.stack(each) for each in zip(*(r.values for r in reports), strict=True)]
    add_reports(now, reports[0], values, 0)
    return annotate(tf.reshape(tf.stack(activations, 1), x_BLM.shape), "BLM")


def _rows_of_parts(tensor: tf.Tensor, parts: int) -> list[tf.Tensor]:
    rows, *shape = tensor.shape
    return tf.unstack(tf.reshape(tensor, [rows // parts, parts, *shape]), axis=1)
