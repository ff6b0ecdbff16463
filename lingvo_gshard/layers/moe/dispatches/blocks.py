"""Blocks: experts on rows that are sorted by expert, block by block, in loops.

As in MegaBlocks (Gale et al. 2022, arXiv 2211.15841, section 4) every expert computes as many rows
as it has, in blocks of a fixed size. XLA knows no sizes that depend on data; what depends on data
here is how often a loop is run, and which of a few sizes an expert's last block has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from lingvo_gshard.core import context, dynamic_slice, random_numbers
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.autodiff.remat_policy import SavedProducts
from lingvo_gshard.core.context import Context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.partitioning import use_partitioning

_POLICY = "products"
# Layouts of the operands and the result of experts' products, for who keeps their results.
_HIDDEN, _OUTPUT = ("CM", "EMH", "CH"), ("CH", "EHM", "CM")

# Rows of a block, at most, and of the steps in which the size of an expert's last block goes.
LARGEST_BLOCK = 512
SMALLEST_STEP = 8
# How many sizes there are for an expert's last block.
STEPS = 4

Tensors = Sequence[tf.Tensor]
Network = Callable[[NestedMap, tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """The rows of a whole block, a multiple of `step`; an expert's last block has fewer steps."""

    whole: int
    step: int

    @classmethod
    def of(cls, rows: int, num_experts: int) -> BlockSizes:
        """Returns sizes for `rows` of all experts: one block for a balanced load that is small."""
        balanced = min(-(-rows // num_experts), LARGEST_BLOCK)
        step = _up_to_multiple(-(-balanced // STEPS), SMALLEST_STEP)
        return cls(_up_to_multiple(balanced, step), step)


@dataclasses.dataclass(frozen=True)
class Loads:
    """Where each expert's rows begin and how many they are; the experts that have any, first."""

    starts: tf.Tensor
    loads: tf.Tensor
    order: tf.Tensor
    active: tf.Tensor

    @classmethod
    def of(cls, load_E: tf.Tensor) -> Loads:
        """Returns those of experts that have int32 [E] rows, one after another."""
        has_rows = load_E > 0
        count = tf.cast(has_rows, tf.int32)
        num_experts = load_E.shape[0]
        # Not by a sort: TensorFlow cannot lower to StableHLO a slice that begins where one says.
        place = tf.where(has_rows, tf.cumsum(count, exclusive=True), num_experts)
        order = tf.scatter_nd(place[:, tf.newaxis], tf.range(num_experts), [num_experts + 1])
        return cls(tf.cumsum(load_E, exclusive=True), load_E, order, tf.reduce_sum(count))


@dataclasses.dataclass(frozen=True)
class _Turn:
    """One expert's turn: its weights, and how its rows are cut into blocks, the last one apart."""

    weights: list[tf.Tensor]
    start: tf.Tensor
    whole_blocks: tf.Tensor
    last_start: tf.Tensor
    last_rows: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Has experts compute sorted rows.

    network: (one expert's weights, [C,M]) -> [C,M], row by row; to its last product's result
    something may be added, and nothing else be done with it. theta: all experts' weights, which
    begin with E.
    """

    network: Network
    theta: NestedMap
    loads: Loads
    sizes: BlockSizes
    context: Context = dataclasses.field(default_factory=context.current)

    def run(self, rows_RM: tf.Tensor) -> tf.Tensor:
        """Returns [R,M]: what experts make of their rows.

        The last expert's rows must be followed by a whole block of rows, which mean nothing.
        """
        leaves = [tf.cast(w, rows_RM.dtype) for w in tf.nest.flatten(self.theta)]
        specs = self._trace(rows_RM, leaves)
        outer = context.current().saved_products
        layouts = [_OUTPUT, *[_HIDDEN] * len(specs)]
        known = [outer.restore(*layout) for layout in layouts] if outer else [None]

        @custom_gradient
        def compute(rows: tf.Tensor, *leaves: tf.Tensor):
            y, *kept = known
            if any(result is None for result in known):
                hidden = [tf.zeros([rows.shape[0], *s.shape[1:]], s.dtype) for s in specs]
                y, *kept = self._forward(rows, leaves, [tf.zeros_like(rows), *hidden])
            if outer:
                for layout, result in zip(layouts, [y, *kept], strict=True):
                    outer.save(*layout, result)
            return tf.identity(y), lambda d_y: self._backward(rows, leaves, kept, d_y)

        return compute(rows_RM, *leaves)

    def _trace(self, rows: tf.Tensor, leaves: Tensors) -> list[tf.TensorSpec]:
        """What is kept of a whole block, seen aside: shapes and types."""
        specs: list[tf.TensorSpec] = []

        # Marked as recomputing, so that nothing is recorded twice.
        aside = dataclasses.replace(self, context=Context(is_recomputing=True))

        def once(rows: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
            y, *kept = aside._compute(weights, rows, None)
            specs[:] = [tf.TensorSpec(x.shape, x.dtype) for x in kept]
            return y

        shapes = [[self.sizes.whole, *rows.shape[1:]], *(w.shape[1:] for w in leaves)]
        arguments = [tf.TensorSpec(shape, rows.dtype) for shape in shapes]
        tf.function(once, autograph=False).get_concrete_function(*arguments)
        return specs

    def _forward(self, rows: tf.Tensor, leaves: Tensors, buffers: list) -> list[tf.Tensor]:
        """Returns the buffers, filled with all experts' outputs and what is kept of them."""

        def turn_of(count: tf.Tensor, buffers: list) -> tuple:
            turn = self._turn(count, leaves)[1]

            def one_of(size: int) -> list[tf.Tensor]:
                block = dynamic_slice.read(rows, turn.last_start, size)
                results = self._compute(turn.weights, block, turn.last_start)
                return [_padded(x, self.sizes.whole) for x in results]

            def block_of(index: tf.Tensor, buffers: list) -> tuple:
                start = turn.start + index * self.sizes.whole
                block = dynamic_slice.read(rows, start, self.sizes.whole)
                return index + 1, _written(
                    buffers, self._compute(turn.weights, block, start), start
                )

            _, buffers = tf.while_loop(
                lambda index, _: index < turn.whole_blocks, block_of, (tf.constant(0), buffers)
            )
            last = self._by_size(turn.last_rows, one_of)
            return count + 1, _written(buffers, last, turn.last_start)

        return self._over_experts(turn_of, buffers)

    def _backward(
        self, rows: tf.Tensor, leaves: Tensors, kept: Tensors, d_y: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the gradients of the rows and of the weights."""

        def turn_of(count: tf.Tensor, buffers: list) -> tuple:
            expert, turn = self._turn(count, leaves)

            def gradients(start: tf.Tensor, d_block: tf.Tensor) -> list[tf.Tensor]:
                size = d_block.shape[0]
                parts = [dynamic_slice.read(x, start, size) for x in (rows, *kept)]
                return self._gradients(turn.weights, parts[0], parts[1:], d_block, start)

            def one_of(size: int) -> list[tf.Tensor]:
                is_own = tf.range(size) < turn.last_rows
                d_last = dynamic_slice.read(d_y, turn.last_start, size)
                d_last = tf.where(is_own[:, tf.newaxis], d_last, tf.zeros_like(d_last))
                d_rows, *d_weights = gradients(turn.last_start, d_last)
                return [_padded(d_rows, self.sizes.whole), *d_weights]

            def block_of(index: tf.Tensor, d_buffer: tf.Tensor, sums: list) -> tuple:
                start = turn.start + index * self.sizes.whole
                d_block, *d_weights = gradients(
                    start, dynamic_slice.read(d_y, start, self.sizes.whole)
                )
                sums = [x + tf.cast(d, x.dtype) for x, d in zip(sums, d_weights, strict=True)]
                return index + 1, dynamic_slice.write(d_buffer, d_block, start), sums

            d_buffer, *d_leaves = buffers
            d_last, *sums = self._by_size(turn.last_rows, one_of)
            d_buffer = dynamic_slice.write(d_buffer, d_last, turn.last_start)
            _, d_buffer, sums = tf.while_loop(
                lambda index, *_: index < turn.whole_blocks,
                block_of,
                (tf.constant(0), d_buffer, [tf.cast(x, tf.float32) for x in sums]),
            )
            own = [tf.cast(x, d.dtype)[tf.newaxis] for x, d in zip(sums, d_leaves, strict=True)]
            return count + 1, [d_buffer, *_written(d_leaves, own, expert)]

        return self._over_experts(turn_of, [tf.zeros_like(x) for x in (rows, *leaves)])

    def _turn(self, count: tf.Tensor, leaves: Tensors) -> tuple[tf.Tensor, _Turn]:
        """The `count`-th expert of those that have rows."""
        expert = tf.gather(self.loads.order, count)
        start, load = (tf.gather(x, expert) for x in (self.loads.starts, self.loads.loads))
        whole_blocks = (load - 1) // self.sizes.whole
        in_whole = whole_blocks * self.sizes.whole
        weights = [tf.squeeze(dynamic_slice.read(w, expert, 1), 0) for w in leaves]
        return expert, _Turn(weights, start, whole_blocks, start + in_whole, load - in_whole)

    def _over_experts(self, turn_of: Callable, buffers: list) -> list[tf.Tensor]:
        """The buffers after the turns of all experts that have rows."""
        start = (tf.constant(0), list(buffers))
        return tf.while_loop(lambda count, _: count < self.loads.active, turn_of, start)[1]

    def _by_size(self, rows: tf.Tensor, one_of: Callable[[int], list]) -> list[tf.Tensor]:
        """one_of(size) for the least size that holds 1 to a whole block of rows."""
        step = self.sizes.step
        branches = [
            functools.partial(one_of, size) for size in range(step, self.sizes.whole + 1, step)
        ]
        if len(branches) == 1:
            return branches[0]()
        return tf.switch_case((rows - 1) // step, branches)

    def _compute(
        self, weights: Tensors, block: tf.Tensor, start: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """Returns the output of the block that begins at row `start`, and what is kept of it."""
        saved = SavedProducts(_POLICY)
        with self._block_at(start), saved.saving():
            output = self.network(self._packed(weights), block)
        return [output, *saved.results[:-1]]

    def _gradients(
        self,
        weights: Tensors,
        block: tf.Tensor,
        kept: Tensors,
        d_output: tf.Tensor,
        start: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the gradients of the block's rows and of the weights."""
        unused = tf.zeros_like(d_output)
        with (
            tf.GradientTape() as tape,
            self._block_at(start),
            context.override(is_recomputing=True),
            SavedProducts(_POLICY).restoring([*kept, unused]),
        ):
            tape.watch([block, *weights])
            output = self.network(self._packed(weights), block)
        return tape.gradient(
            output,
            [block, *weights],
            output_gradients=d_output,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )

    @contextlib.contextmanager
    def _block_at(self, start: tf.Tensor) -> Iterator[None]:
        """What holds for the block that begins at row `start`, which draws random numbers apart.

        Rows are one device's, in the gradient as well, which is computed outside of the region.
        """
        now = self.context.part(self.context.iteration)
        if now.seed is not None:
            now.seed = random_numbers.hashed_fold_in_word(now.seed, start)
        with context.use(now), use_partitioning(None):
            yield

    def _packed(self, weights: Tensors) -> NestedMap:
        return tf.nest.pack_sequence_as(self.theta, list(weights))


def _written(buffers: Tensors, parts: Tensors, start: tf.Tensor) -> list[tf.Tensor]:
    return [dynamic_slice.write(b, part, start) for b, part in zip(buffers, parts, strict=True)]


def _padded(rows: tf.Tensor, size: int) -> tf.Tensor:
    return tf.pad(rows, [[0, size - rows.shape[0]], [0, 0]])


def _up_to_multiple(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
