"""Cross-entropy of a softmax over a large vocabulary, without a tensor of all logits.

A loop computes the logits of one chunk of positions at a time. The loss is a sum over positions, so
its gradient is known up to one factor. Each iteration therefore computes the gradient of its
activations as well, and adds to the gradient of the weight. The backward pass only multiplies by
the factor, and no product is computed twice. Liger Kernel does the same on one GPU: Hsu et al.
2024, arXiv 2410.10989, section 3.2.

Chunks of the vocabulary would need no sum of the weight's gradient over chunks. But the gradient of
a chunk of ids depends on the logits of all ids, so all logits would be computed twice.

Every device loops over its own positions. Tensors of the loop have a dimension for the parts of B
and one for the parts of L, whose sums stay apart until the loop ends:

    x_nBLtM    n chunks of t positions for each part of B and of L

If V divides into equal parts, the gradient of the activations has a dimension for these, too. Then
all collectives of activations and weights are outside of the loop. Inside, devices exchange maxima
and sums over V: a few numbers for each position.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

from lingvo_gshard.core import LOSS_SCOPE, context, custom_gradient, known_sizes, tf
from lingvo_gshard.layers import (
    LONG_LOSSES,
    CrossEntropy,
    LossOfProducts,
    Objective,
    soft_cap,
    soft_cap_gradient,
)
from lingvo_gshard.sharding import annotate, einsum, parts_of

Tensors: TypeAlias = "Sequence[tf.Tensor]"

LOCAL_LETTERS = {
    "n": "chunks",
    "t": "positions of a chunk in one part of B and L",
    "v": "ids of one part of V",
    "x": "rows of one part of B",
    "y": "positions of one part of L",
}

# An iteration reads and writes the float32 sum of the weight's gradient: 8 bytes for each weight.
# It computes 6 operations for each weight and position. With this many positions the bytes take 11%
# of the time of the operations on a TPU v5p (2,765 GB/s, 459 TFLOP/s), 19% on an H100 (3,350 GB/s,
# 989 TFLOP/s).
POSITIONS = 2048
# Bytes of a device's float32 logits. Smaller ones are all computed at once.
SMALL = 512 * 2**20


@LONG_LOSSES.register("chunks")
def chunked_loss(wanted: int, x_BLM: tf.Tensor, vocabulary_size: int) -> LossOfProducts | None:
    """Returns a loss that has a chunk of the logits at a time; None if all are computed at once."""
    positions = positions_at_once(wanted, x_BLM, vocabulary_size)
    return functools.partial(chunked_cross_entropy, positions=positions) if positions else None


def positions_at_once(wanted: int, x_BLM: tf.Tensor, vocabulary_size: int) -> int:
    """Returns how many positions of a device a chunk has; 0 if all logits are computed at once.

    Args:
      wanted: number of positions. 0 decides by size: there are chunks if all logits take more
        memory than one chunk and the sum of the weight's gradient.
    """
    rows, length, model_dim = known_sizes(x_BLM.shape)
    parts = parts_of("BLV")
    positions = math.ceil(rows / parts[0]) * math.ceil(length / parts[1])
    if wanted:
        return wanted if wanted < positions else 0
    is_small = 4 * positions * math.ceil(vocabulary_size / parts[2]) < SMALL
    # A loop of fewer positions needs as much memory as it avoids, or more. Measured by plans of
    # Llama 3.1 8B for v5p and H100: docs/memory_and_communication.md has the table.
    is_short = positions < 2 * (POSITIONS + model_dim)
    return 0 if is_small or is_short else POSITIONS


def chunked_cross_entropy(
    x_BLM: tf.Tensor, weight: tf.Tensor, layout: str, objective: Objective, positions: int
) -> CrossEntropy:
    """Returns the sums of `losses.cross_entropy` for the logits x W.

    Products have the type of x. Sums over chunks are float32. `smoothed` has gradients for x, the
    weight and the bias.

    Args:
      weight: the softmax's weight.
      layout: letters of the weight, "MV" or "VM".
      positions: largest number of positions of a device in a chunk.
    """
    chunks = _Chunks.of(x_BLM, weight, layout, objective, positions)
    is_training = context.current().training

    # Labels are arguments: TensorFlow does not capture a tensor that only a loop in a gradient
    # reads.
    @custom_gradient
    def compute(*tensors: tf.Tensor):
        sums, found = chunks.run(tensors, with_gradients=is_training)

        def gradient(d_smoothed: tf.Tensor, *_: tf.Tensor) -> list[tf.Tensor | None]:
            gradients = found or chunks.run(tensors, with_gradients=True)[1]
            d_x_BLM, *d_weights = chunks.complete(gradients, d_smoothed, tensors)
            return [d_x_BLM, None, None, *d_weights]

        return tuple(sums), gradient

    mask_BL = tf.cast(tf.not_equal(objective.mask_BL, 0), tf.int32)
    smoothed, exact, correct = compute(
        x_BLM,
        tf.cast(objective.labels_BL, tf.int32),
        mask_BL,
        tf.cast(weight, x_BLM.dtype),
        *([] if objective.bias_V is None else [objective.bias_V]),
    )
    return CrossEntropy(
        smoothed=smoothed,
        exact=tf.stop_gradient(exact),
        correct=tf.stop_gradient(correct),
        tokens=tf.reduce_sum(tf.cast(mask_BL, tf.float32)),
    )


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """The loop over chunks.

    Its methods take the tensors of `chunked_cross_entropy` as one sequence: x_BLM, labels_BL,
    mask_BL, the weight, and the bias if there is one.

    Attributes:
      sizes: sizes of B, L, M and V.
      parts: parts of B, L and V.
      size: positions of a chunk in each part of B and L.
      scope: name scope of the softmax, with a slash at its end.
    """

    objective: Objective
    layout: str
    sizes: tuple[int, int, int, int]
    parts: tuple[int, int, int]
    count: int
    size: int
    scope: str

    @classmethod
    def of(
        cls, x_BLM: tf.Tensor, weight: tf.Tensor, layout: str, objective: Objective, positions: int
    ) -> _Chunks:
        """Returns the loop for the arguments of `chunked_cross_entropy`."""
        parts = parts_of("BLV")
        rows, length, model_dim = known_sizes(x_BLM.shape)
        own = math.ceil(rows / parts[0]) * math.ceil(length / parts[1])
        count, scope = math.ceil(own / positions), tf.get_current_name_scope()
        return cls(
            objective=objective,
            layout=layout,
            sizes=(rows, length, model_dim, known_sizes(weight.shape)[layout.index("V")]),
            parts=(parts[0], parts[1], parts[2]),
            count=count,
            size=math.ceil(own / count),
            scope=scope and f"{scope}/",
        )

    @property
    def has_equal_ids(self) -> bool:
        """Whether V is split into equal parts. Then each has its own gradient of x in the loop."""
        return self.parts[2] > 1 and self.sizes[3] % self.parts[2] == 0

    @property
    def ids(self) -> str:
        """The letters of the ids in tensors of the loop."""
        return "Vv" if self.has_equal_ids else "V"

    @property
    def weight(self) -> str:
        """The letters of the weight in the loop."""
        return self.layout.replace("V", self.ids)

    @property
    def d_x(self) -> str:
        """The letters of the gradient of a chunk's activations."""
        return "VBLtM" if self.has_equal_ids else "BLtM"

    def run(self, tensors: Tensors, with_gradients: bool) -> tuple[Tensors, Tensors]:
        """Returns the sums of `smoothed`, `exact` and `correct`, and gradients.

        The sum of the losses has gradients for x by chunk, the weight and the bias, before sums
        over parts. They are empty if they are not asked for.
        """
        x_BLM, labels_BL, mask_BL, *weights = tensors
        x_nBLtM, labels_nBLt, mask_nBLt = map(self._divide, (x_BLM, labels_BL, mask_BL))
        # Gathered before the loop: iterations only read them.
        weights = [self._by_part(w, a) for w, a in zip(weights, (self.layout, "V"), strict=False)]

        def body(i: tf.Tensor, sums: Tensors, stacks: list, d_weights: list) -> tuple:
            chunk = [_read(each, i) for each in (x_nBLtM, labels_nBLt, mask_nBLt)]
            losses, d_logits = self._losses(chunk, weights)
            if with_gradients:
                d_x, *more = self._gradients(d_logits, chunk[0], weights)
                stacks = [stack.write(i, d_x) for stack in stacks]
                d_weights = [d + x for d, x in zip(d_weights, more, strict=True)]
            sums = [s + tf.reduce_sum(x, -1) for s, x in zip(sums, losses, strict=True)]
            return i + 1, sums, stacks, d_weights

        b_parts, l_parts, _ = self.parts
        sums = [annotate(tf.zeros([b_parts, l_parts]), "BL", reserved="V")] * 3
        stacks, d_weights = self._zeros(x_BLM.dtype, weights) if with_gradients else ([], [])
        _, sums, stacks, d_weights = tf.while_loop(
            lambda i, *_: i < self.count,
            body,
            (tf.constant(0), sums, stacks, d_weights),
            maximum_iterations=self.count,
        )
        return [tf.reduce_sum(x) for x in sums], [*(x.stack() for x in stacks), *d_weights]

    def complete(
        self, gradients: Tensors, d_smoothed: tf.Tensor, tensors: Tensors
    ) -> list[tf.Tensor]:
        """Returns the gradients of x, the weight and the bias, given those that `run` returned.

        Each is multiplied by its factor in float32, and then summed over parts in its own type.
        """
        x_BLM, _, _, *weights = tensors
        d_x, *d_weights = (
            tf.cast(d_smoothed * tf.cast(gradient, tf.float32), x.dtype)
            for gradient, x in zip(gradients, (x_BLM, *weights), strict=True)
        )
        d_x = self._join(d_x)
        d_x_BLM = annotate(_summed(d_x, 1) if self.has_equal_ids else d_x, "BLM")
        pairs = zip(d_weights, weights, strict=True)
        return [d_x_BLM, *(tf.reshape(_summed(d, 2), w.shape) for d, w in pairs)]

    def _losses(self, chunk: Tensors, weights: Tensors) -> tuple[Tensors, tf.Tensor]:
        """Returns losses of a chunk, and the float32 gradient of the sum of its products x W.

        The losses are the terms [B,L,t] of `smoothed`, `exact` and `correct`. A chunk has x_BLtM,
        labels_BLt and mask_BLt. The weights are the weight and the bias, by parts of V.
        """
        (x_BLtM, labels_BLt, mask_BLt), (weight, *biases) = chunk, weights
        # Remat units cannot save a product of a loop's body.
        with tf.name_scope(self.scope), context.override(saved_products=None):
            products = einsum(f"BLtM,{self.weight}->BLt{self.ids}", x_BLtM, weight)
        with tf.name_scope(f"{LOSS_SCOPE}/"):
            values = tf.cast(products, tf.float32)
            for bias in biases:
                values += tf.cast(bias, tf.float32)
            values = soft_cap(values, self.objective.cap)
            is_label = tf.equal(self._by_part(tf.range(self.sizes[3]), "V"), self._wide(labels_BLt))
            losses, d_values = self._losses_of(values, is_label)
            d_products = soft_cap_gradient(d_values, values, self.objective.cap)
            # Padding may have any logits, also infinite ones.
            is_real_BLt = tf.not_equal(mask_BLt, 0)
            losses = [tf.where(is_real_BLt, loss_BLt, 0.0) for loss_BLt in losses]
            return losses, tf.where(self._wide(is_real_BLt), d_products, 0.0)

    def _losses_of(self, values: tf.Tensor, is_label: tf.Tensor) -> tuple[Tensors, tf.Tensor]:
        """Returns the terms [B,L,t] of the sums, and the gradient of the float32 logits."""
        smoothing, z_loss_weight = self.objective.label_smoothing, self.objective.z_loss_weight
        axes = list(range(3, 3 + len(self.ids)))
        largest_BLt = tf.reduce_max(values, axes)
        total_BLt = tf.reduce_sum(tf.exp(values - self._wide(largest_BLt)), axes)
        log_z_BLt = largest_BLt + tf.math.log(total_BLt)
        label_BLt = tf.reduce_sum(tf.where(is_label, values, 0.0), axes)
        exact_BLt = smoothed_BLt = log_z_BLt - label_BLt
        if smoothing:
            uniform_BLt = log_z_BLt - tf.reduce_sum(values, axes) / self.sizes[3]
            smoothed_BLt = (1 - smoothing) * exact_BLt + smoothing * uniform_BLt
        # These exponentials differ from those above, which XLA would keep in memory otherwise.
        d_values = tf.exp(values - self._wide(log_z_BLt))
        if z_loss_weight:
            smoothed_BLt += z_loss_weight * tf.square(log_z_BLt)
            d_values *= self._wide(1 + 2 * z_loss_weight * log_z_BLt)
        d_values -= tf.where(is_label, 1 - smoothing, 0.0) + smoothing / self.sizes[3]
        correct_BLt = tf.cast(tf.equal(label_BLt, largest_BLt), tf.float32)
        return (smoothed_BLt, exact_BLt, correct_BLt), d_values

    def _gradients(
        self, d_products: tf.Tensor, x_BLtM: tf.Tensor, weights: Tensors
    ) -> list[tf.Tensor]:
        """Returns the gradients of a chunk's x, and float32 ones of the weight and the bias."""
        with tf.name_scope(f"gradient_tape/{self.scope}"):
            narrow = tf.cast(d_products, x_BLtM.dtype)
            d_x = tf.einsum(f"BLt{self.ids},{self.weight}->{self.d_x}", narrow, weights[0])
            d_x = annotate(d_x, self.d_x, reserved="" if self.has_equal_ids else "V")
            d_weight = tf.einsum(f"BLtM,BLt{self.ids}->BL{self.weight}", x_BLtM, narrow)
            d_weight = annotate(tf.cast(d_weight, tf.float32), f"BL{self.weight}")
            d_biases = [
                annotate(tf.reduce_sum(d_products, 2), f"BL{self.ids}") for _ in weights[1:]
            ]
            return [d_x, d_weight, *d_biases]

    def _zeros(self, dtype: tf.DType, weights: Tensors) -> tuple[list, list[tf.Tensor]]:
        """Returns an array for the gradients of x, and sums of gradients before the first chunk."""
        b_parts, l_parts, v_parts = self.parts
        shape = [b_parts, l_parts, self.size, self.sizes[2]]
        shape = [v_parts, *shape] if self.has_equal_ids else shape
        sums = [
            annotate(tf.zeros([b_parts, l_parts, *weight.shape]), f"BL{letters}")
            for weight, letters in zip(weights, (self.weight, self.ids), strict=False)
        ]
        return [tf.TensorArray(dtype, self.count, element_shape=shape)], sums

    def _by_part(self, x: tf.Tensor, layout: str) -> tf.Tensor:
        """Returns a weight, a bias or ids with the dimensions of V that the loop has."""
        x = annotate(x, layout)
        if not self.has_equal_ids:
            return x
        v = self.parts[2]
        sizes = [[v, n // v] if a == "V" else [n] for a, n in zip(layout, x.shape, strict=True)]
        return annotate(tf.reshape(x, sum(sizes, [])), layout.replace("V", self.ids))

    def _wide(self, x_BLt: tf.Tensor) -> tf.Tensor:
        """Returns numbers of positions with dimensions of size 1 for V."""
        return tf.reshape(x_BLt, [*x_BLt.shape, *[1] * len(self.ids)])

    def _divide(self, x: tf.Tensor) -> tf.Tensor:
        """Returns chunks [n,B,L,t,...] of a tensor [B,L,...], padded with zeros."""
        b_parts, l_parts, _ = self.parts
        more, own = known_sizes(x.shape)[2:], self.count * self.size
        rows, length = (
            math.ceil(n / parts) for n, parts in zip(self.sizes, self.parts[:2], strict=False)
        )
        layout = "BxLyM"[: 4 + len(more)]
        x = annotate(x, "BLM"[: 2 + len(more)], reserved="V")
        x = _padded(_padded(x, 0, b_parts * rows), 1, l_parts * length)
        x = annotate(tf.reshape(x, [b_parts, rows, l_parts, length, *more]), layout, reserved="V")
        x = tf.reshape(_swapped(x, 1, 2), [b_parts, l_parts, rows * length, *more])
        x = tf.reshape(_padded(x, 2, own), [b_parts, l_parts, self.count, self.size, *more])
        x = _swapped(_swapped(x, 1, 2), 0, 1)
        return annotate(x, "nBLtM"[: 4 + len(more)], reserved="V")

    def _join(self, x: tf.Tensor) -> tf.Tensor:
        """Returns [B,L,M] of chunks [n,B,L,t,M], without padding. A V before B remains first."""
        b_parts, l_parts, _ = self.parts
        first, (row_count, positions, model_dim, _) = int(self.has_equal_ids), self.sizes
        rows, length = math.ceil(row_count / b_parts), math.ceil(positions / l_parts)
        for dimension in range(first + 2):
            x = _swapped(x, dimension, dimension + 1)
        outer = known_sizes(x.shape)[:first]
        x = tf.reshape(x, [*outer, b_parts, l_parts, self.count * self.size, model_dim])
        x = tf.reshape(
            x[..., : rows * length, :], [*outer, b_parts, l_parts, rows, length, model_dim]
        )
        x = _swapped(x, first + 1, first + 2)
        x = tf.reshape(x, [*outer, b_parts * rows, l_parts * length, model_dim])[
            ..., :row_count, :positions, :
        ]
        return annotate(x, "VBLM") if first else annotate(x, "BLM", reserved="V")


def _read(chunks: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    """Returns chunk i, annotated. XLA reads no more than this chunk."""
    start = [i] + [0] * (chunks.shape.rank - 1)
    chunk = tf.squeeze(tf.slice(chunks, start, [1, *chunks.shape[1:]]), 0)
    return annotate(chunk, "BLtM"[: chunk.shape.rank], reserved="V")


def _padded(x: tf.Tensor, dimension: int, size: int) -> tf.Tensor:
    """Returns a tensor with zeros after a dimension's end up to a size."""
    missing = size - known_sizes(x.shape)[dimension]
    if not missing:
        return x
    return tf.pad(x, [[0, missing if i == dimension else 0] for i in range(x.shape.rank)])


def _summed(x: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the sum over the first `count` dimensions of a tensor, which are parts.

    TensorFlow's sum has XLA exchange bfloat16 numbers as float32. A product does not.
    """
    letters = "abcdefgh"[: x.shape.rank]
    parts = tf.ones(x.shape[:count], x.dtype)
    return tf.einsum(f"{letters},{letters[:count]}->{letters[count:]}", x, parts)


def _swapped(x: tf.Tensor, first: int, second: int) -> tf.Tensor:
    order = list(range(x.shape.rank))
    order[first], order[second] = second, first
    return tf.transpose(x, order)
