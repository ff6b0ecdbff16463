"""Steps of a Keras model as Programs: the model's own train_step and test_step, lowered by XLA."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import UserError, known_sizes, tf
from lingvo_gshard.keras.layouts import Layouts
from lingvo_gshard.runtime import Array, HeldVariable, Program, Tracing, lower

TRAIN, TEST = "train", "test"


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A lowered step of a Keras model.

    Attributes:
      program: takes the arrays of a batch and then the state; returns the logs and the new state.
      logs: the structure of the logs, with the index of each number among the results.
      batch_size: number of arrays of a batch.
      log_size: number of results before the state.
    """

    program: Program
    logs: Any
    batch_size: int
    log_size: int

    @property
    def state_paths(self) -> list[str]:
        """The paths of the state's arrays, in the order of the program."""
        return [array.path for array in self.program.inputs[self.batch_size :]]


def flat_batch(batch: Any) -> list[Any]:
    """Returns the arrays of a batch in order. None, which Keras may have in a batch, is none."""
    return [leaf for leaf in tf.nest.flatten(batch) if not _is_none(leaf)]


def as_arrays(batch: Any) -> list[np.ndarray]:
    """Returns the arrays of a batch in the memory of the host."""
    return [np.asarray(leaf) for leaf in flat_batch(batch)]


def lower_step(
    model: Any,
    kind: str,
    batch: Any,
    held: Sequence[HeldVariable],
    layouts: Layouts,
    partitioner: str = "gspmd",
    tracing: Tracing = contextlib.nullcontext,
) -> StepProgram:
    """Returns a step of a built model over a mesh.

    Args:
      model: the compiled model. Its own `train_step` or `test_step` is traced.
      kind: "train" or "test".
      batch: a batch, or `tf.TensorSpec`s in the structure of a batch.
      layouts: how batches are split, and the mesh.
      partitioner: "gspmd" or "shardy".
      tracing: as in `lower`.

    Raises:
      UserError: XLA has no kernel for an operation, or the model uses a variable that Keras does
        not track.
    """
    inputs = [_batch_array(index, leaf, layouts) for index, leaf in enumerate(flat_batch(batch))]
    structures: list[Any] = []
    step = model.train_step if kind == TRAIN else model.test_step

    def function(*tensors: tf.Tensor) -> list[tuple[str, tf.Tensor, Any]]:
        logs = step(_packed(batch, tensors))
        numbers = iter(range(len(tf.nest.flatten(logs))))
        structures[:] = [tf.nest.map_structure(lambda _: next(numbers), logs)]
        values = [tf.convert_to_tensor(value) for value in tf.nest.flatten(logs)]
        return [(f"logs[{i}]", value, ((),) * len(value.shape)) for i, value in enumerate(values)]

    with _in_words(model):
        program = lower(
            f"{kind}_step",
            function,
            inputs,
            layouts.partitioning,
            partitioner=partitioner,
            tracing=tracing,
            variables=held,
        )
    logs = structures[0]
    return StepProgram(program, logs, len(inputs), len(tf.nest.flatten(logs)))


def _is_none(leaf: Any) -> bool:
    """Returns whether a leaf stands for nothing. Datasets have an empty Optional in its place."""
    return leaf is None or isinstance(leaf, tf.experimental.Optional)


def _packed(batch: Any, tensors: Sequence[tf.Tensor]) -> Any:
    rest = iter(tensors)
    leaves = [None if _is_none(leaf) else next(rest) for leaf in tf.nest.flatten(batch)]
    return tf.nest.pack_sequence_as(batch, leaves)


def _batch_array(index: int, leaf: Any, layouts: Layouts) -> Array:
    dtype = tf.as_dtype(leaf.dtype)
    if dtype == tf.string:
        raise UserError(
            f"array {index} of a batch has strings, which XLA does not compute with; turn them "
            "into numbers in the dataset: dataset.map(lambda x, y: (layer(x), y))"
        )
    shape = tuple(known_sizes(leaf.shape))
    return Array(f"batch[{index}]", shape, dtype.name, layouts.of_batch(shape))


# Parts of TensorFlow's messages on operations that XLA has no kernel for.
_UNSUPPORTED = re.compile(r"(?:unsupported operations|No registered '(\w+)' OpKernel)", re.I)
_OPERATION = re.compile(r"(\w+) \(No registered")
_NODE = re.compile(r"\{\{(?:function_node [^}]*\}\} ?\{\{)?node ([^}]+)\}\}")


@contextlib.contextmanager
def _in_words(model: Any) -> Iterator[None]:
    """Turns errors of XLA about a model's operations into UserErrors."""
    failures: tuple[type[Exception], ...] = (
        tf.errors.InvalidArgumentError,
        tf.errors.UnimplementedError,
        ValueError,
    )
    try:
        yield
    except UserError as error:
        if "uses variables" not in str(error):
            raise
        raise UserError(
            f"{model.name}: {str(error).split('. ')[0]}, which Keras does not track. Make them "
            "weights of a layer (add_weight), or keras.Variables that are attributes of a layer"
        ) from None
    except failures as error:
        text = str(error)
        if not (_UNSUPPORTED.search(text) or "compile-time constant" in text):
            raise
        raise UserError(f"{model.name} cannot be compiled: {_explained(text)}") from error


def _explained(text: str) -> str:
    """Returns what XLA cannot compile, and what to do instead."""
    operation = _OPERATION.search(text)
    node = _NODE.search(text)
    where = f" of {node[1].rpartition('/')[0]}" if node and "/" in node[1] else ""
    if "compile-time constant" in text:
        return (
            f"a shape{where} depends on values. XLA needs fixed shapes: pad, and mask what is "
            "padded"
        )
    name = operation[1] if operation else "an operation"
    return (
        f"XLA has no kernel for {name}{where}. Text, lookups and other preprocessing belong into "
        "the dataset: dataset.map(lambda x, y: (preprocessing(x), y))"
    )
