"""Finds the operations that make values non-finite of finite ones, in eager mode."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import context, tf
from lingvo_gshard.core.lazy import op_callbacks
from lingvo_gshard.wings.tracing.source_lines import line_of

NAN, INFINITY = "NaN", "infinity"


@dataclasses.dataclass(frozen=True)
class Origin:
    """An operation that makes NaN or infinity although its operands have none.

    Attributes:
      kind: NAN or INFINITY.
      operation: TensorFlow's type of the operation, such as "Log".
      layer: path of the layer that computes; "" in the backward pass and outside of layers.
      source: the line that computes, such as "my_layer.py:12"; "" if it is unknown.
      of: in the backward pass, the line that computed an operand; "" if it is unknown.
    """

    kind: str
    operation: str
    layer: str
    source: str
    of: str = ""

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        where += f" of what {self.of} computes" if self.of else ""
        return f"{self.operation}{where} makes {self.kind}"


class Origins:
    """The operations that made values non-finite, in the order of execution.

    Attributes:
      found: the origins. Each kind is listed once for each line.
    """

    def __init__(self):
        self.found: dict[Origin, None] = {}
        self._lines: dict[int, str] = {}

    def history(self, kind: str, layer: str = "") -> list[Origin]:
        """Returns the first origin of a kind within a layer; empty if there is none.

        Before a NaN stands the first infinity that was made earlier, since NaN often follows from
        an overflow or a division by 0.
        """
        earlier: list[Origin] = []
        for origin in self.found:
            if layer and not f"{origin.layer}.".startswith(f"{layer}."):
                continue
            if origin.kind == kind:
                return [*earlier[:1], origin]
            earlier.append(origin)
        return []

    def add(
        self, operation: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]
    ) -> None:
        """Records what an operation computes."""
        source = _current_line()
        before, after = _kinds(inputs), _kinds(outputs)
        of = "" if source else next(filter(None, map(self._line, reversed(inputs))), "")
        for kind in sorted(after - before):
            self.found.setdefault(Origin(kind, operation, _current_layer(), source, of))
        for output in outputs:
            self._lines[_identity(output)] = source

    def _line(self, tensor: tf.Tensor) -> str:
        return self._lines.get(_identity(tensor), "")


@contextlib.contextmanager
def watching_origins() -> Iterator[Origins]:
    """Records the operations that make values non-finite inside a `with` block.

    Operations of traced functions have no values and are not seen.
    """
    origins = Origins()

    def on_operation(
        operation: str,
        inputs: Sequence[tf.Tensor],
        attributes: Any,
        outputs: Sequence[tf.Tensor],
        name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> None:
        if graph is None:
            origins.add(operation, inputs, outputs)

    op_callbacks.add_op_callback(on_operation)
    try:
        yield origins
    finally:
        op_callbacks.remove_op_callback(on_operation)


def _kinds(tensors: Sequence[tf.Tensor]) -> set[str]:
    """Returns which of NAN and INFINITY some tensors have."""
    found: set[str] = set()
    for tensor in tensors:
        if not tensor.dtype.is_floating:
            continue
        values = tensor.numpy()
        if not np.isfinite(values).all():
            found |= {NAN} if np.isnan(values).any() else set()
            found |= {INFINITY} if np.isinf(values).any() else set()
    return found


def _current_line() -> str:
    def frames() -> Iterator[tuple[str, int]]:
        frame = sys._getframe()
        while frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back

    return line_of(frames())


def _current_layer() -> str:
    now = context.current()
    return now.iteration.path(now.layer_path) if now.iteration else now.layer_path


def _identity(tensor: tf.Tensor) -> int:
    # Equal for all Python objects of one eager tensor. Numbers are not used again.
    return getattr(tensor, "_id", -1)
