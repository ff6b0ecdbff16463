"""Micro-batches: computes a batch in parts, with the gradients of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from lingvo_gshard.core import NestedMap, Params, UserError, random_numbers, tf
from lingvo_gshard.sharding import annotate, annotate_like
from lingvo_gshard.training import (
    OWN_LOSS,
    STEP_PARTS,
    AccumulateGradients,
    ComputeGradients,
    Ingredients,
    LossAndGradients,
    LossWeights,
    StepPart,
    TensorBatch,
    WeighLosses,
)

_REDUCE_DTYPE = "step.reduce_dtype"
REDUCE_DTYPES = ("float32", "bfloat16")
# The metric that is summed over parts. All others are averaged.
_COUNT = "tokens"


@STEP_PARTS.register("micro-batches")
class MicroBatches(StepPart):
    """Computes the gradients of a step's batch in parts."""

    @classmethod
    def define(cls, p: Params) -> None:
        """Adds `micro_batches` and `reduce_dtype` to the trainer's Params."""
        about = "Number of parts of a batch that are computed in sequence."
        p.define("micro_batches", 1, about, minimum=1)
        p.define(
            "reduce_dtype",
            "float32",
            "Type in which devices add up gradients that are summed over micro-batches: "
            f"{' or '.join(REDUCE_DTYPES)}.",
            choices=REDUCE_DTYPES,
        )

    @classmethod
    def of(cls, made: Ingredients) -> MicroBatches | None:
        """Returns the part of a trainer with several micro-batches."""
        count, dtype = made.params.micro_batches, made.params.reduce_dtype
        return cls(count, dtype) if count > 1 else None

    def __init__(self, count: int, reduce_dtype: str):
        """Takes the number of parts, and the type of their sums; see `accumulate`."""
        self._count, self._reduce_dtype = count, reduce_dtype

    @property
    def accumulate(self) -> AccumulateGradients:
        """The function `accumulate` with these options."""
        return functools.partial(accumulate, count=self._count, reduce_dtype=self._reduce_dtype)


def accumulate(
    compute: ComputeGradients,
    weigh: WeighLosses,
    batch: TensorBatch,
    key: tf.Tensor,
    specs: NestedMap,
    count: int,
    reduce_dtype: str = "float32",
) -> LossAndGradients:
    """Returns `compute` of the whole batch, computed in `count` parts in sequence.

    The task's loss and each loss of a layer join as they declare, most of them as means by the
    tokens that they count, in float32. For this their weights are added up in a first pass over the
    parts. XLA keeps little of this pass, since weights depend on padding alone. Where every device
    of a batch's axes holds a whole weight, it adds up the gradients of its own rows over all parts,
    and the devices add up their sums once, after the last part (wings/spmd_passes/loop_sums.py).
    Routers dispatch and balance the tokens of each part on their own, so each part has auxiliary
    losses of its own. Random numbers differ between parts. In graph mode the parts are a loop.

    Args:
      compute: computes one part.
      weigh: computes the weights of one part.
      batch: feature name -> tensor; part i takes every count-th row, from row i on.
      key: int32 [2], seeds the random numbers.
      specs: the weights' tree of VariableSpec; gradients are sharded like the weights.
      reduce_dtype: the type that the sums over parts are rounded to before devices add them up.

    Raises:
      UserError: the number of rows is not a multiple of `count`.
    """
    for name, rows in batch.items():
        size = rows.shape[0]
        assert size is not None, f"{name} has an unknown number of rows"
        if size % count:
            raise UserError(
                f"step.micro_batches={count} does not divide input.batch_rows, the {size} rows of "
                f"{name}"
            )
    weights = sum_over_parts(weigh, batch, key, count)
    sums = _Sums(compute, weights, batch, key, count, specs, reduce_dtype)
    total = sums.one_by_one() if tf.executing_eagerly() else sums.by_loop()
    return sums.means(total)


def sum_over_parts(
    compute: Callable[[TensorBatch, tf.Tensor], Mapping[str, tf.Tensor]],
    batch: TensorBatch,
    key: tf.Tensor,
    count: int,
) -> dict[str, tf.Tensor]:
    """Returns the sums over the parts of a batch of float32 tensors, by name.

    Args:
      compute: computes the tensors of one part.
      batch: as in `accumulate`.
      key: int32 [2], seeds the random numbers. Part i draws the random numbers that part i draws in
        `accumulate`.
    """
    if count == 1:
        return dict(compute(batch, key))
    names: list[str] = []

    def terms(i: tf.Tensor) -> list[tf.Tensor]:
        found = compute(_part(batch, i, count), random_numbers.hashed_fold_in_word(key, i))
        names[:] = found
        return list(found.values())

    if tf.executing_eagerly():
        columns = zip(*(terms(tf.constant(i)) for i in range(count)), strict=True)
        return dict(zip(names, map(tf.add_n, columns), strict=False))
    traced = tf.function(terms, autograph=False)
    once = traced.get_concrete_function(tf.TensorSpec([], tf.int32))

    def body(i: tf.Tensor, sums: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        return i + 1, [total + term for total, term in zip(sums, once(i), strict=True)]

    start = (tf.constant(0), [tf.zeros(shape) for shape in once.output_shapes])
    sums = tf.while_loop(lambda i, _: i < count, body, start)[1]
    return dict(zip(names, sums, strict=True))


def _part(batch: TensorBatch, i: tf.Tensor, count: int) -> TensorBatch:
    """Returns every count-th row, from row i on: an equal share of each device's rows."""

    def rows(array: tf.Tensor) -> tf.Tensor:
        shape = array.shape.as_list()
        assert shape[0] is not None, "a batch has an unknown number of rows"
        by_part = tf.reshape(array, [shape[0] // count, count, *shape[1:]])
        part = tf.gather(by_part, i, axis=1)
        return annotate(part, "BL") if len(shape) == 2 else part

    return {name: rows(array) for name, array in batch.items()}


class _Sums:
    """Sums of results over the parts, as a flat list of float32 tensors."""

    def __init__(
        self,
        compute: ComputeGradients,
        weights: LossWeights,
        batch: TensorBatch,
        key: tf.Tensor,
        count: int,
        specs: NestedMap,
        reduce_dtype: str,
    ):
        self._compute, self._weights, self._batch, self._key = compute, weights, batch, key
        self._count, self._specs, self._reduce_dtype = count, specs, reduce_dtype
        self._names: list[str] = []

    def one_by_one(self) -> list[tf.Tensor]:
        """Returns the sums, computed eagerly."""
        parts = [self._terms(tf.constant(i)) for i in range(self._count)]
        return functools.reduce(self._combined, parts)

    def by_loop(self) -> list[tf.Tensor]:
        """Returns the sums, computed by a loop in the graph."""
        traced = tf.function(self._terms, autograph=False)
        shapes = traced.get_concrete_function(tf.TensorSpec([], tf.int32)).output_shapes
        zeros = self._as_weights([tf.zeros(shape) for shape in shapes])

        def body(i: tf.Tensor, sums: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
            return i + 1, self._as_weights(self._combined(sums, self._terms(i)))

        start = (tf.constant(0), zeros)
        return tf.while_loop(lambda i, _: i < self._count, body, start)[1]

    def _combined(self, sums: list[tf.Tensor], terms: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums after one more part. Of measurements it keeps the larger numbers."""
        specs = self._specs.flatten()
        measured = [False] * (len(sums) - len(specs)) + [spec.is_measured for spec in specs]
        triples = zip(sums, terms, measured, strict=True)
        return [tf.maximum(a, b) if is_measured else a + b for a, b, is_measured in triples]

    def _terms(self, i: tf.Tensor) -> list[tf.Tensor]:
        """Returns the terms of part i: its loss, each metric and its weight, gradients."""
        part = _part(self._batch, i, self._count)
        key = random_numbers.hashed_fold_in_word(self._key, i)
        loss, metrics, gradients = self._compute(part, key, self._weights)
        self._names = list(metrics)
        sums = [loss]
        for value, weight in metrics.values():
            sums += [value * weight, weight]
        return sums + [tf.cast(gradient, tf.float32) for gradient in gradients.flatten()]

    def _as_weights(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums, with gradients sharded like the weights."""
        specs = self._specs.flatten()
        scalars, gradients = sums[: -len(specs)], sums[-len(specs) :]
        pairs = zip(gradients, specs, strict=True)
        return [*scalars, *(annotate_like(gradient, spec) for gradient, spec in pairs)]

    def means(self, sums: Sequence[tf.Tensor]) -> LossAndGradients:
        """Returns the loss, the metrics and the gradients of the whole batch."""
        metrics = {}
        for index, name in enumerate(self._names):
            value, weight = sums[1 + 2 * index : 3 + 2 * index]
            mean = tf.math.divide_no_nan(value, weight)
            metrics[name] = (value if name == _COUNT else mean, weight)
        metrics["loss"] = (sums[0], self._weights[OWN_LOSS])
        totals = sums[1 + 2 * len(self._names) :]
        if self._reduce_dtype != "float32":
            # The lowering rounds the sums of the devices before they are added up (loop_sums.py).
            totals = [tf.cast(tf.cast(each, self._reduce_dtype), tf.float32) for each in totals]
        return sums[0], metrics, self._specs.pack(totals)
