"""Finds the line of a model's code that made an operation."""

from __future__ import annotations

import functools
import pathlib
import re
import sysconfig
from collections.abc import Iterable

from lingvo_gshard.core import RECOMPUTED_SCOPE, tf

_PACKAGE = pathlib.Path(__file__).parents[2]
# Files that only pass calls on, and files that call the model.
_HELPERS = (
    "layers/products.py",
    "wings/fine_tuning/adapters.py",
    "wings/inference/stored_weights.py",
    "wings/low_precision",
    "wings/tracing",
)
_PASSING = (
    *(str(_PACKAGE / name) for name in ("core", "sharding", *_HELPERS)),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib")),
)
_CALLING_WINGS = (
    *("local_updates", "optimizers", "profiling", "propagation", "services"),
    "verification",
)
_CALLERS = (
    *(str(_PACKAGE / name) for name in ("runtime", "training")),
    *(str(_PACKAGE / "wings" / name) for name in _CALLING_WINGS),
)


def line_of(frames: Iterable[tuple[str, int]]) -> str:
    """Returns the innermost line of a model among the frames of a call stack.

    Args:
      frames: file and line of each frame, the innermost first.

    Returns:
      The file and the line, such as "my_layer.py:12"; "" if no frame belongs to a model.
    """
    for file, line in frames:
        if file.startswith(_CALLERS):
            break
        if not file.startswith(_PASSING):
            return shown(file, line)
    return ""


def shown(file: str, line: int) -> str:
    """Returns a file and a line as reports show them: within the package, or the name alone."""
    path = pathlib.Path(file)
    is_ours = path.is_relative_to(_PACKAGE)
    return f"{path.relative_to(_PACKAGE.parent) if is_ours else path.name}:{line}"


_GRADIENT, _RECOMPUTED = "gradient_tape/", f"{RECOMPUTED_SCOPE}/"

_VECTORIZED = "/pfor/"
_CALLS = re.compile(r"^.*\b(?:(?:Stateful)?PartitionedCall(?:_\d+)?|call\.\d+)/")


class GraphLines:
    """The operations of a traced function, and the lines that made them."""

    def __init__(self, graphs: Iterable[tf.Graph]):
        self._operations: dict[str, tf.Operation] = {}
        self._lines: dict[str, str] = {}
        for graph in graphs:
            for operation in graph.get_operations():
                self._operations.setdefault(operation.name, operation)

    @functools.cached_property
    def order(self) -> dict[str, int]:
        """The position of each operation in the order of tracing, by name."""
        return {name: position for position, name in enumerate(self._operations)}

    def operation(self, name: str) -> tf.Operation | None:
        """Returns the operation of this name, or the loop or branch that contains it.

        TensorFlow puts the name of a call before the names of the called function's operations. A
        vectorized or recomputed operation counts as the original operation.
        """
        within = _CALLS.sub("", name).partition(_VECTORIZED)[0]
        for candidate in dict.fromkeys((within, within.removeprefix(_RECOMPUTED), name)):
            while candidate:
                if candidate in self._operations:
                    return self._operations[candidate]
                candidate = candidate.rpartition("/")[0]
        return None

    def line(self, name: str) -> str:
        """Returns the line that made an operation, such as "my_layer.py:12"; "" if it is unknown.

        TensorFlow makes gradients after all lines of the model. A gradient belongs to the line of
        the operation that it differentiates, if only one line can be meant.
        """
        if name not in self._lines:
            found = self.operation(name)
            self._lines[name] = found and (line_of_operation(found) or self._forward(found)) or ""
        return self._lines[name]

    def _forward(self, gradient: tf.Operation) -> str:
        """Returns the line of the only operation that this can be the gradient of, or ""."""
        _, begin, rest = gradient.name.partition(_GRADIENT)
        scope = rest.rpartition("/")[0]
        if not begin or not gradient.outputs:
            return ""
        shape = gradient.outputs[0].shape
        lines = {
            line_of_operation(each)
            for each in self._by_scope.get(scope, ())
            if each.type == gradient.type.removesuffix("Grad")
            and any(tensor.shape == shape for tensor in each.inputs)
        } - {""}
        return lines.pop() if len(lines) == 1 else ""

    @functools.cached_property
    def _by_scope(self) -> dict[str, list[tf.Operation]]:
        scopes: dict[str, list[tf.Operation]] = {}
        for name, operation in self._operations.items():
            scopes.setdefault(name.rpartition("/")[0], []).append(operation)
        return scopes


def line_of_operation(operation: tf.Operation) -> str:
    """Returns the line of a model that made an operation; "" if no line of a model did."""
    # Operations of functions that TensorFlow copies have no traceback.
    frames = reversed(list(operation.traceback or ()))
    return line_of((frame.filename, frame.lineno) for frame in frames)
