"""Orthogonalization of the matrices of a weight by Newton-Schulz iterations on a mesh.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. A matrix X = U S V^T becomes
about U V^T: its singular values become about 1, and the singular vectors stay. With the norm of all
elements:

    X = X / (norm(X) + epsilon)
    5 times:  A = X X^T;  X = a X + (b A + c A A) X

A is computed over the smaller side of X, so X^T X takes its place in a matrix with more rows than
columns. Products are einsums over the letters of the weight. So nothing is transposed, and a side
of several letters, such as N and D, is never merged.

A weight that stacks layers, or has experts, is a batch of matrices. How the mesh splits them:

- Devices that hold different matrices, such as experts, work without communication.
- A stack is computed a few layers at a time. Where the mesh splits the matrices of a stack, an
  all-to-all gives each device a whole matrix of its own: with `fsdp` over 8 devices, 8 layers at a
  time. A second all-to-all brings the results back. This is the distribution of Liu et al. 2025
  (arXiv 2502.16982, section 2.3), with an all-to-all in place of the all-gather.
- A matrix of no stack stays split along its larger side. A is then a sum over devices, which an
  all-reduce computes. An all-to-all moves a split of the smaller side to the larger side first.
"""

from __future__ import annotations

import dataclasses
import math
import string

from lingvo_gshard.core import MATRIX, VariableSpec, known_sizes, letters, shapes, tf, write_slice
from lingvo_gshard.sharding import Mesh, current_partitioning, xla

# These maximize the slope at 0. Singular values end between about 0.68 and 1.2 (Jordan et al.).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

_VOCABULARY, _HEADS, _HEAD_SIZE = "V", "N", "D"

# Letter -> mesh axes that split its dimension, major first.
_Axes = dict[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The matrices of a weight.

    Letters of the layout that are in neither side count matrices.

    Attributes:
      inputs: the letters that products of activations with the weight sum over.
      outputs: the letters of the other side.
    """

    spec: VariableSpec
    inputs: str
    outputs: str

    def size(self, side: str) -> int:
        """Returns the number of elements along a side."""
        sizes = dict(zip(self.spec.layout, self.spec.shape, strict=True))
        return math.prod(sizes[letter] for letter in side)

    @property
    def smaller(self) -> str:
        """The letters of the smaller side."""
        return min(self.inputs, self.outputs, key=self.size)

    @property
    def larger(self) -> str:
        """The letters of the larger side."""
        return self.outputs if self.smaller == self.inputs else self.inputs


def matrices_of(spec: VariableSpec, per_head: bool = False) -> Matrices | None:
    """Returns the matrices of a weight; None for tables, biases, scales and the softmax.

    If the spec names no `inputs`, the first dimension is the side of the inputs, and the next is
    the side of the outputs. N and D together count as one dimension here. A weight with more
    dimensions has no matrices.

    Args:
      per_head: whether each head of queries, keys and values has a matrix of its own.
    """
    own = spec.layout.lstrip(letters.WEIGHT_BATCH)
    if spec.role != MATRIX or _VOCABULARY in own:
        return None
    heads = _HEADS + _HEAD_SIZE
    inputs = spec.inputs or (heads if own.startswith(heads) else own[:1])
    outputs = "".join(letter for letter in own if letter not in inputs)
    if not outputs or not (spec.inputs or len(outputs) == 1 or outputs == heads):
        return None
    if per_head and len(outputs) > 1:
        outputs = outputs.replace(_HEADS, "")
    return Matrices(spec, inputs, outputs)


def orthogonalize(
    x: tf.Tensor, matrices: Matrices, steps: int, epsilon: float, dtype: str
) -> tf.Tensor:
    """Returns the orthogonalized matrices of a tensor, in float32.

    Args:
      x: float32, in the layout of a weight, and split like its moments.
      matrices: the matrices of the weight.
      epsilon: added to the norm of a matrix.
      dtype: type of the products, "float32" or "bfloat16".
    """
    layout = matrices.spec.layout
    sides = [layout.index(letter) for letter in matrices.inputs + matrices.outputs]
    norm = tf.sqrt(tf.reduce_sum(tf.square(x), sides, keepdims=True))
    x = tf.cast(x / (norm + epsilon), dtype)
    plan = _Plan.make(matrices)
    return tf.cast(plan.by_layer(x, steps), tf.float32)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Splits of the matrices of one weight while they are orthogonalized.

    Attributes:
      mesh: the mesh; None if nothing is split.
      splits: the split of the moments, and the splits that follow it. Products use the last one.
      stack: the letter of the stack that is computed in parts, or "".
    """

    matrices: Matrices
    mesh: Mesh | None
    splits: tuple[_Axes, ...]
    stack: str

    @classmethod
    def make(cls, matrices: Matrices) -> _Plan:
        """Returns the plan under the current partitioning."""
        spec = matrices.spec
        current = None if tf.executing_eagerly() else current_partitioning()
        mesh = current.mesh if current and current.mesh.size > 1 else None
        start: _Axes = dict.fromkeys(spec.layout, ())
        if current and mesh:
            split = current.storage_split(spec.shape, current.spec_split(spec, "moments"))
            for letter, axes in zip(spec.layout, split, strict=True):
                start[letter] = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
        stacks = [x for x in spec.layout[: spec.stacked] if not start[x]]
        stack = stacks[-1] if stacks else ""
        splits = _splits(matrices, start, stack, mesh) if mesh else (start,)
        return cls(matrices, mesh, splits, stack)

    def by_layer(self, x: tf.Tensor, steps: int) -> tf.Tensor:
        """Returns the orthogonalized matrices; of a stack, a few layers at a time."""
        layout = self.matrices.spec.layout
        if not self.stack or tf.executing_eagerly():
            return self._orthogonalize(x, steps)
        dimension = layout.index(self.stack)
        layers = known_sizes(x.shape)[dimension]
        at_once = self.mesh.parts(self.splits[-1][self.stack]) if self.mesh else 1
        times = math.ceil(layers / at_once)
        # Devices without a layer orthogonalize zeros.
        padding = [[0, 0]] * len(layout)
        padding[dimension] = [0, times * at_once - layers]
        x = self._annotate(tf.pad(x, padding), layout, self.splits[0])

        def compute(i: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            part = shapes.read_slice(x, i * at_once, at_once, dimension)
            part = self._orthogonalize(part, steps)
            x = write_slice(x, part, i * at_once, dimension)
            return i + 1, self._annotate(x, layout, self.splits[0])

        if times == 1:
            x = self._orthogonalize(x, steps)
        else:
            _, x = tf.while_loop(lambda i, _: i < times, compute, (tf.constant(0), x))
        return shapes.read_slice(x, 0, layers, dimension)

    def _orthogonalize(self, x: tf.Tensor, steps: int) -> tf.Tensor:
        """Moves a part of the weight to where it is computed, orthogonalizes it, and moves back."""
        layout = self.matrices.spec.layout
        for split in self.splits:
            x = self._annotate(x, layout, split)
        x = self._iterate(x, steps)
        for split in reversed(self.splits):
            x = self._annotate(x, layout, split)
        return x

    def _iterate(self, x: tf.Tensor, steps: int) -> tf.Tensor:
        layout, row = self.matrices.spec.layout, self.matrices.smaller
        batch = "".join(x for x in layout if x not in row + self.matrices.larger)
        unused = [letter for letter in string.ascii_lowercase if letter not in layout]
        middle, column = "".join(unused[: len(row)]), "".join(unused[-len(row) :])
        of_column = layout.translate(str.maketrans(row, column))
        square, split = batch + row + column, self.splits[-1]
        a, b, c = COEFFICIENTS

        def iterate(i: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            gram = tf.einsum(f"{layout},{of_column}->{square}", x, x)
            gram = self._annotate(gram, square, split)
            both = f"{batch}{row}{middle},{batch}{middle}{column}->{square}"
            polynomial = b * gram + c * tf.einsum(both, gram, gram)
            polynomial = self._annotate(polynomial, square, split)
            x = a * x + tf.einsum(f"{square},{of_column}->{layout}", polynomial, x)
            return i + 1, self._annotate(x, layout, split)

        return tf.while_loop(lambda i, _: i < steps, iterate, (tf.constant(0), x))[1]

    def _annotate(self, x: tf.Tensor, layout: str, split: _Axes) -> tf.Tensor:
        if self.mesh is None:
            return x
        return xla.tile(x, tuple(split.get(letter, ()) for letter in layout), self.mesh)


def _splits(matrices: Matrices, start: _Axes, stack: str, mesh: Mesh) -> tuple[_Axes, ...]:
    """Returns the split of the moments, and the next ones until products need no larger one.

    Each step moves the axes of one letter. They become the minor axes of the letter that they move
    to, so that the step is one all-to-all. Axes of the smaller side that divide no letter of the
    larger side are dropped, which is an all-gather of a matrix.
    """
    found = [start]
    sizes = dict(zip(matrices.spec.layout, matrices.spec.shape, strict=True))

    def joined(letter: str, axes: tuple[str, ...]) -> int:
        return mesh.parts(found[-1][letter] + axes)

    def takes_stack(axes: tuple[str, ...]) -> bool:
        # At least half of the devices have a layer to orthogonalize.
        parts = joined(stack, axes)
        return math.ceil(sizes[stack] / parts) * parts <= 2 * sizes[stack]

    for letter in matrices.smaller + matrices.larger:
        axes = start[letter]
        if not axes:
            continue
        taking = [stack] if stack and takes_stack(axes) else []
        if not taking and letter in matrices.larger:
            continue
        taking += [x for x in matrices.larger if sizes[x] % joined(x, axes) == 0]
        split = {**found[-1], letter: ()}
        if taking:
            split[taking[0]] += axes
        found.append(split)
    return tuple(found)
