"""Micro-batches: a step whose batch is computed part by part, with the gradients of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from lingvo_gshard.core import context, random_numbers
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate, annotate_like

TensorBatch = dict[str, tf.Tensor]
Result = tuple[tf.Tensor, dict[str, context.Metric], NestedMap]
# compute(batch, key): the loss, the metrics and the gradients of a batch.
Compute = Callable[[TensorBatch, tf.Tensor], Result]

# The metric that is a count, which parts add to; all others are means.
_COUNT = "tokens"


def accumulate(
    compute: Compute, batch: TensorBatch, key: tf.Tensor, count: int, specs: NestedMap
) -> Result:
    """Returns what `compute` would of the whole batch, in `count` parts, one after another.

    Losses and gradients are means weighted as the metric 'loss' is, by the tokens of each part, and
    summed in float32; so are the layers' own losses, each of which is that of a part: experts are
    routed and balanced part by part. Random numbers differ from part to part.

    specs: of the weights, which gradients are split like. In graph mode the parts are one loop.
    Raises ValueError if the rows do not divide by `count`.
    """
    for name, rows in batch.items():
        if rows.shape[0] % count:
            raise ValueError(
                f"trainer.micro_batches={count} does not divide input.batch_rows, the "
                f"{rows.shape[0]} rows of {name}"
            )
    sums = _Sums(compute, batch, key, count, specs)
    total = sums.one_by_one() if tf.executing_eagerly() else sums.by_loop()
    return sums.means(total)


class _Sums:
    """Sums, over the parts, of what a result is made of, as one flat list of float32 tensors."""

    def __init__(
        self, compute: Compute, batch: TensorBatch, key: tf.Tensor, count: int, specs: NestedMap
    ):
        self._compute, self._batch, self._key = compute, batch, key
        self._count, self._specs = count, specs
        self._names: list[str] = []

    def one_by_one(self) -> list[tf.Tensor]:
        parts = [self._of_part(tf.constant(i)) for i in range(self._count)]
        return [tf.add_n(column) for column in zip(*parts, strict=True)]

    def by_loop(self) -> list[tf.Tensor]:
        traced = tf.function(self._of_part, autograph=False)
        shapes = traced.get_concrete_function(tf.TensorSpec([], tf.int32)).output_shapes
        zeros = self._as_weights([tf.zeros(shape) for shape in shapes])

        def body(i: tf.Tensor, sums: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
            pairs = zip(sums, self._of_part(i), strict=True)
            return i + 1, self._as_weights([total + part for total, part in pairs])

        start = (tf.constant(0), zeros)
        return tf.while_loop(lambda i, _: i < self._count, body, start)[1]

    def _of_part(self, i: tf.Tensor) -> list[tf.Tensor]:
        """The weight of part i and its loss, each metric and its weight, and the gradients."""
        part = {name: self._rows(rows, i) for name, rows in self._batch.items()}
        loss, metrics, gradients = self._compute(
            part, random_numbers.hashed_fold_in_word(self._key, i)
        )
        self._names = list(metrics)
        weight = metrics["loss"][1] if "loss" in metrics else tf.ones([])
        sums = [weight, weight * loss]
        for value, value_weight in metrics.values():
            sums += [value * value_weight, value_weight]
        return sums + [weight * tf.cast(g, tf.float32) for g in gradients.flatten()]

    def _rows(self, rows: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
        """Every count-th row, from row i on: of each device's rows an equal share."""
        shape = rows.shape.as_list()
        by_part = tf.reshape(rows, [shape[0] // self._count, self._count, *shape[1:]])
        part = tf.gather(by_part, i, axis=1)
        return annotate(part, "BL") if len(shape) == 2 else part

    def _as_weights(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums, those of gradients split as the weights are."""
        specs = self._specs.flatten()
        scalars, gradients = sums[: -len(specs)], sums[-len(specs) :]
        pairs = zip(gradients, specs, strict=True)
        return [*scalars, *(annotate_like(gradient, spec) for gradient, spec in pairs)]

    def means(self, sums: Sequence[tf.Tensor]) -> Result:
        """Returns the loss, the metrics and the gradients of the whole batch."""
        weight, loss = sums[:2]
        metrics = {}
        for index, name in enumerate(self._names):
            value, value_weight = sums[2 + 2 * index : 4 + 2 * index]
            mean = tf.math.divide_no_nan(value, value_weight)
            metrics[name] = (value if name == _COUNT else mean, value_weight)
        gradients = [gradient / weight for gradient in sums[2 + 2 * len(self._names) :]]
        return loss / weight, metrics, self._specs.pack(gradients)
