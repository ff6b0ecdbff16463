"""One forward and backward pass of a layer: inputs, weights, and functions that run the pass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lingvo_gshard.core import Layer, NestedMap, Params, context, known_sizes, tf
from lingvo_gshard.sharding import annotate_weights

# Sizes of the inputs: rows, positions of targets and sources, model dimension and so on.
B, L, K, M, N, H, E, V = 2, 6, 7, 8, 2, 12, 4, 11

_TARGET_SEGMENTS = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]], np.int32)
_SOURCE_SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 0]], np.int32)

Call = Callable[[Any, NestedMap, NestedMap], tf.Tensor]

RUNNERS: dict[str, Callable[[Callable], Callable]] = {
    "eager": lambda function: function,
    "function": lambda function: tf.function(function, autograph=False),
    "jit": lambda function: tf.function(function, autograph=False, jit_compile=True),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer under test.

    Attributes:
      call: (layer, theta, inputs) -> output, with the inputs of `make_inputs`.
      draws: whether it draws random numbers in training.
      packs: whether the output of a sentence does not depend on the sentences packed with it. False
        if experts overflow, or if the output is a mean over the batch.
    """

    name: str
    params: Params
    call: Call
    draws: bool = False
    packs: bool = True

    def build(self) -> Layer:
        """Returns the layer, at the path `layer`."""
        return self.params.instantiate(path="layer")


@contextlib.contextmanager
def noted(what: str) -> Iterator[None]:
    """Adds a note to what is raised, so that the first failure ends a test and says where it is."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def make_inputs() -> NestedMap:
    """Returns activations, a memory and token ids of two packed rows, as NumPy arrays.

    Queries and targets have length L, the memory and sources length K. Padding has random values.
    """
    rng = np.random.default_rng(1)
    inputs = NestedMap(
        x=rng.normal(size=(B, L, M)).astype(np.float32),
        memory=rng.normal(size=(B, K, M)).astype(np.float32),
        source_segments=_SOURCE_SEGMENTS.copy(),
        source_positions=_positions_of(_SOURCE_SEGMENTS),
        target_segments=_TARGET_SEGMENTS.copy(),
        target_positions=_positions_of(_TARGET_SEGMENTS),
    )
    for name, length in (("source_ids", K), ("target_inputs", L), ("target_labels", L)):
        inputs[name] = rng.integers(0, V, (B, length)).astype(np.int32)
    return inputs


def _positions_of(segments: np.ndarray) -> np.ndarray:
    """Returns positions that restart at 0 in every segment and are 0 in padding."""
    before = [[(row[:i] == s).sum() if s else 0 for i, s in enumerate(row)] for row in segments]
    return np.array(before, np.int32)


def make_theta(layer: Layer, seed: int = 3) -> NestedMap:
    """Returns random weights, without the zeros and ones of their initial values."""
    rng = np.random.default_rng(seed)
    return with_trained(layer, seed, lambda w: w + (0.2 * rng.normal(size=w.shape)).astype("f4"))


def with_trained(layer: Layer, seed: int, change: Callable[[Any], Any]) -> NestedMap:
    """Returns initial weights with those changed that are trained.

    Others may be tables of whole numbers.
    """
    pairs = zip(layer.variable_specs().flatten(), layer.init(seed).flatten(), strict=True)
    return layer.variable_specs().pack(w if s.is_frozen else change(w) for s, w in pairs)


def pass_of(case: Case, training: bool) -> Callable[..., NestedMap]:
    """Returns a function (theta, inputs, seed) that runs one forward and backward pass.

    The function returns NestedMap(output, losses, metrics, gradients). The gradients are the
    derivatives of `objective` with respect to the weights and the floating-point inputs.
    """
    layer = case.build()

    def run(theta: NestedMap, inputs: NestedMap, seed: tf.Tensor) -> NestedMap:
        sources = NestedMap(theta=theta, x=inputs.x, memory=inputs.memory)
        with context.scope(training=training, seed=seed) as scope, tf.GradientTape() as tape:
            tape.watch(sources.flatten())
            output = case.call(layer, theta, inputs)
            weighted = tf.reduce_sum(output * cotangent(output.shape))
            total = tf.add_n([weighted, *scope.losses.values()])
        zero = tf.UnconnectedGradients.ZERO
        flat: Any = tape.gradient(total, sources.flatten(), unconnected_gradients=zero)
        return NestedMap(
            output=output,
            losses=NestedMap(scope.losses),
            metrics=NestedMap({name: value for name, (value, _) in scope.metrics.items()}),
            gradients=sources.pack(tf.convert_to_tensor(g) for g in flat),
        )

    return run


def partitioned_pass_of(case: Case, training: bool) -> Callable[..., NestedMap]:
    """Returns `pass_of` with annotated weights, for `partition` and `verify`."""
    specs, function = case.build().variable_specs(), pass_of(case, training)

    @functools.wraps(function)
    def run(theta: NestedMap, inputs: NestedMap, seed: tf.Tensor) -> NestedMap:
        result = function(annotate_weights(theta, specs), inputs, seed)
        # On one device, a dropless dispatch has no bound to report.
        shared = {n: x for n, x in result.metrics.items() if not n.endswith("/over_bound_share")}
        return NestedMap({**result, "metrics": NestedMap(shared)})

    return run


def cotangent(shape: tf.TensorShape) -> np.ndarray:
    """Returns fixed weights of the outputs in the objective; 0 in padding, as in any loss."""
    weights = np.random.default_rng(7).normal(size=known_sizes(shape)).astype(np.float32)
    if weights.ndim:
        weights[_TARGET_SEGMENTS == 0] = 0
    return weights


def objective(result: NestedMap) -> float:
    """Returns the float64 scalar whose gradients a pass computes."""
    output = result.output.numpy().astype(np.float64)
    losses = [float(loss) for loss in result.losses.values()]
    return float((output * cotangent(result.output.shape)).sum()) + sum(losses)


def with_other_padding(inputs: NestedMap) -> NestedMap:
    """Returns the inputs with other values in padding, of rows and of the memory."""
    rng = np.random.default_rng(13)
    for name, value in inputs.items():
        side = "source" if value.shape[1] == K else "target"
        padding = inputs[f"{side}_segments"] == 0
        if value.dtype == np.float32:
            value[padding] = 100 * rng.normal(size=value[padding].shape)
        elif name in ("source_ids", "target_inputs", "target_labels"):
            value[padding] = (value[padding] + 1) % V
    return inputs


def sentences(segments_BL: np.ndarray) -> list[tuple[int, int]]:
    """Returns (row, segment) of each packed sentence."""
    return [(row, s) for row, r in enumerate(segments_BL) for s in np.unique(r) if s]


def unpacked(inputs: NestedMap, packed: list[tuple[int, int]]) -> NestedMap:
    """Returns the same sentences, each at the beginning of a row of its own."""
    rng = np.random.default_rng(17)
    found = NestedMap()
    for name, value in inputs.items():
        side = "source" if value.shape[1] == K else "target"
        shape = (len(packed), *value.shape[1:])
        is_float = value.dtype == np.float32
        found[name] = (
            rng.normal(size=shape).astype(np.float32) if is_float else np.zeros(shape, "i4")
        )
        for row, (packed_row, segment) in enumerate(packed):
            chosen = value[packed_row, inputs[f"{side}_segments"][packed_row] == segment]
            found[name][row, : len(chosen)] = 1 if name.endswith("_segments") else chosen
    return found
