"""Runs experts on rows sorted by expert, block by block, in loops.

As in MegaBlocks (Gale et al. 2022, arXiv 2211.15841, section 4), each expert computes exactly the
rows it has, in blocks of a fixed size. XLA has no data-dependent shapes. Only two things depend on
data: the number of iterations, and the size of an expert's last block, out of a few sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from lingvo_gshard.core import (
    Context,
    NestedMap,
    context,
    custom_gradient,
    random_numbers,
    read_slice,
    remat_policy,
    restoring,
    saving,
    scopes,
    tf,
    write_slice,
)

LOCAL_LETTERS = {"r": "rows sorted by expert, with padding"}
# An attribute of TensorFlow's conditionals.
_FINDS_CONSTANTS = "_xla_propagate_compile_time_consts"
_POLICY = "products"


# Layouts of the operands and results of the experts' products, for the remat policy.
_HIDDEN, _OUTPUT = ("CM", "EMH", "CH"), ("CH", "EHM", "CM")


# An expert with more rows computes them in several blocks.
LARGEST_BLOCK = 512


# An expert's last block has one of STEPS sizes: multiples of a step of at least SMALLEST_STEP rows.
SMALLEST_STEP = 8
STEPS = 4
Tensors: TypeAlias = "Sequence[tf.Tensor]"
Network: TypeAlias = "Callable[[NestedMap, tf.Tensor], tf.Tensor]"


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of blocks, in rows.

    Attributes:
      full: the rows of a full block, a multiple of `step`.
      step: the last block of an expert has the smallest multiple of `step` that holds its rows.
    """

    full: int
    step: int

    @classmethod
    def for_rows(cls, rows: int, num_experts: int) -> BlockSizes:
        """Returns sizes that fit an expert's balanced load in one block, up to LARGEST_BLOCK rows.

        Args:
          rows: the total number of rows of all experts.
        """
        even_load = min(-(-rows // num_experts), LARGEST_BLOCK)
        step = round_up(-(-even_load // STEPS), SMALLEST_STEP)
        return cls(round_up(even_load, step), step)


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """The range of sorted rows of each expert. All tensors are int32.

    Attributes:
      starts: [E], the first row of each expert.
      loads: [E], the number of rows of each expert.
      order: [E+1], the experts, experts with rows first.
      active: scalar, the number of experts that have rows.
    """

    starts: tf.Tensor
    loads: tf.Tensor
    order: tf.Tensor
    active: tf.Tensor

    @classmethod
    def for_loads(cls, load_E: tf.Tensor) -> ExpertRows:
        """Returns the rows of experts with int32 [E] rows each, one expert after another."""
        has_rows = load_E > 0
        count = tf.cast(has_rows, tf.int32)
        num_experts = load_E.shape[0]
        # Not tf.sort: TensorFlow cannot lower its slice with a dynamic start to StableHLO.
        position = tf.where(has_rows, tf.cumsum(count, exclusive=True), num_experts)
        order = tf.scatter_nd(position[:, tf.newaxis], tf.range(num_experts), [num_experts + 1])
        return cls(tf.cumsum(load_E, exclusive=True), load_E, order, tf.reduce_sum(count))


@dataclasses.dataclass(frozen=True)
class _OneExpert:
    """One expert's weights and blocks.

    Attributes:
      weights: its weights, without E.
      full_blocks: the number of full blocks before the last block.
      last_rows: the rows of its last block, at least 1.
    """

    weights: list[tf.Tensor]
    start: tf.Tensor
    full_blocks: tf.Tensor
    last_start: tf.Tensor
    last_rows: tf.Tensor


@dataclasses.dataclass(frozen=True)
class ExpertBlocks:
    """Runs experts on sorted rows.

    Attributes:
      network: (one expert's weights, [C,M]) -> [C,M]. It computes each row independently. After its
        last product it may only add to the result.
      theta: the weights of all experts; their first dimension is E.
      even_rows: rows of all experts under balanced loads, for planning.
    """

    network: Network
    theta: NestedMap
    rows: ExpertRows
    sizes: BlockSizes
    even_rows: int
    context: Context = dataclasses.field(default_factory=context.current)

    def run(self, rows_rM: tf.Tensor) -> tf.Tensor:
        """Returns [r,M]: the experts' outputs for their rows.

        Args:
          rows_rM: the rows sorted by expert, followed by one full block of rows that are ignored.
        """
        leaves = [tf.cast(w, rows_rM.dtype) for w in tf.nest.flatten(self.theta)]
        specs = self._trace(rows_rM, leaves)
        layouts = [_OUTPUT, *[_HIDDEN] * len(specs)]
        outer = context.current().saved_products
        if outer and not all(outer.selects(*layout) for layout in layouts):
            # One loop computes all results, so that saving only some of them spares nothing.
            outer = None
        known = [outer.restore(*layout) for layout in layouts] if outer else [None]

        @custom_gradient
        def compute(rows: tf.Tensor, *leaves: tf.Tensor):
            y, *saved = known
            if any(result is None for result in known):
                hidden = [tf.zeros([rows.shape[0], *s.shape[1:]], s.dtype) for s in specs]
                y, *saved = self._forward(rows, leaves, [tf.zeros_like(rows), *hidden])
            if outer:
                for layout, result in zip(layouts, [y, *saved], strict=True):
                    outer.save(*layout, result)
            return tf.identity(y), lambda d_y: self._backward(rows, leaves, saved, d_y)

        return compute(rows_rM, *leaves)

    def _trace(self, rows: tf.Tensor, leaves: Tensors) -> list[tf.TensorSpec]:
        """Returns the specs of the tensors that one full block saves for the backward pass."""
        specs: list[tf.TensorSpec] = []

        # Marked as recomputation so that nothing is reported twice.
        blocks = dataclasses.replace(self, context=Context(is_recomputing=True))

        def once(rows: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
            y, *saved = blocks._compute(weights, rows, None)
            specs[:] = [tf.TensorSpec(x.shape, x.dtype) for x in saved]
            return y

        shapes = [[self.sizes.full, *rows.shape[1:]], *(w.shape[1:] for w in leaves)]
        arguments = [tf.TensorSpec(shape, rows.dtype) for shape in shapes]
        tf.function(once, autograph=False).get_concrete_function(*arguments)
        return specs

    def _forward(self, rows: tf.Tensor, leaves: Tensors, buffers: list) -> list[tf.Tensor]:
        """Returns the buffers, filled with all experts' outputs and saved tensors."""

        def expert_step(count: tf.Tensor, buffers: list) -> tuple:
            expert = self._expert(count, leaves)[1]

            def last_block(size: int) -> list[tf.Tensor]:
                block = read_slice(rows, expert.last_start, size)
                results = self._compute(expert.weights, block, expert.last_start)
                return [_pad(x, self.sizes.full) for x in results]

            def full_block(index: tf.Tensor, buffers: list) -> tuple:
                start = expert.start + index * self.sizes.full
                block = read_slice(rows, start, self.sizes.full)
                return index + 1, _write_all(
                    buffers, self._compute(expert.weights, block, start), start
                )

            _, buffers = tf.while_loop(
                lambda index, _: index < expert.full_blocks,
                full_block,
                (tf.constant(0), buffers),
                name=self._full_blocks_name,
            )
            last = self._by_size(expert.last_rows, last_block)
            return count + 1, _write_all(buffers, last, expert.last_start)

        return self._over_experts(expert_step, buffers)

    def _backward(
        self, rows: tf.Tensor, leaves: Tensors, saved: Tensors, d_y: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the gradients with respect to the rows and to the weights."""

        def expert_step(count: tf.Tensor, buffers: list) -> tuple:
            index_E, expert = self._expert(count, leaves)

            def gradients(start: tf.Tensor, d_block: tf.Tensor) -> list[tf.Tensor]:
                size = d_block.shape[0]
                parts = [read_slice(x, start, size) for x in (rows, *saved)]
                return self._gradients(expert.weights, parts[0], parts[1:], d_block, start)

            def last_block(size: int) -> list[tf.Tensor]:
                is_own = tf.range(size) < expert.last_rows
                d_last = read_slice(d_y, expert.last_start, size)
                d_last = tf.where(is_own[:, tf.newaxis], d_last, tf.zeros_like(d_last))
                d_rows, *d_weights = gradients(expert.last_start, d_last)
                return [_pad(d_rows, self.sizes.full), *d_weights]

            def full_block(index: tf.Tensor, d_buffer: tf.Tensor, sums: list) -> tuple:
                start = expert.start + index * self.sizes.full
                d_block, *d_weights = gradients(start, read_slice(d_y, start, self.sizes.full))
                sums = [x + tf.cast(d, x.dtype) for x, d in zip(sums, d_weights, strict=True)]
                return index + 1, write_slice(d_buffer, d_block, start), sums

            d_buffer, *d_leaves = buffers
            d_last, *sums = self._by_size(expert.last_rows, last_block)
            d_buffer = write_slice(d_buffer, d_last, expert.last_start)
            _, d_buffer, sums = tf.while_loop(
                lambda index, *_: index < expert.full_blocks,
                full_block,
                (tf.constant(0), d_buffer, [tf.cast(x, tf.float32) for x in sums]),
                name=self._full_blocks_name,
            )
            own = [tf.cast(x, d.dtype)[tf.newaxis] for x, d in zip(sums, d_leaves, strict=True)]
            return count + 1, [d_buffer, *_write_all(d_leaves, own, index_E)]

        return self._over_experts(expert_step, [tf.zeros_like(x) for x in (rows, *leaves)])

    def _expert(self, count: tf.Tensor, leaves: Tensors) -> tuple[tf.Tensor, _OneExpert]:
        """Returns the index of the `count`-th expert that has rows, and that expert."""
        expert = tf.gather(self.rows.order, count)
        start, load = (tf.gather(x, expert) for x in (self.rows.starts, self.rows.loads))
        full_blocks = (load - 1) // self.sizes.full
        in_full = full_blocks * self.sizes.full
        weights = [tf.squeeze(read_slice(w, expert, 1), 0) for w in leaves]
        return expert, _OneExpert(weights, start, full_blocks, start + in_full, load - in_full)

    def _over_experts(self, expert_step: Callable, buffers: list) -> list[tf.Tensor]:
        """Returns the buffers after one step for each expert that has rows."""
        start = (tf.constant(0), list(buffers))
        name = scopes.loop_name(min(self.rows.loads.shape[0], self.even_rows))
        return tf.while_loop(
            lambda count, _: count < self.rows.active, expert_step, start, name=name
        )[1]

    @property
    def _full_blocks_name(self) -> str:
        """The name of the loop over an expert's full blocks."""
        even_load = -(-self.even_rows // self.rows.loads.shape[0])
        return scopes.loop_name(max(even_load - 1, 0) // self.sizes.full)

    def _by_size(self, rows: tf.Tensor, compute: Callable[[int], list]) -> list[tf.Tensor]:
        """Returns compute(size) for the smallest size that holds `rows`, 1 to a full block."""
        step = self.sizes.step
        branches = [
            functools.partial(compute, size) for size in range(step, self.sizes.full + 1, step)
        ]
        if len(branches) == 1:
            return branches[0]()
        results = tf.switch_case((rows - 1) // step, branches)
        if not tf.executing_eagerly():
            # The lowering would look for constants among the branches' inputs, and fill memory of
            # the size of all rows and weights for each. Branches of blocks take no constants.
            case = results[0].op.inputs[0].op
            case._clear_attr(_FINDS_CONSTANTS)  # noqa: SLF001
        return results

    def _compute(
        self, weights: Tensors, block: tf.Tensor, start: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """Returns the output of the block that begins at row `start`, then its saved tensors."""
        saved = remat_policy.SavedProducts(_POLICY)
        with self._block_at(start), saving(saved):
            output = self.network(self._packed(weights), block)
        return [output, *saved.results[:-1]]

    def _gradients(
        self,
        weights: Tensors,
        block: tf.Tensor,
        saved: Tensors,
        d_output: tf.Tensor,
        start: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the gradients with respect to the block's rows and to the weights."""
        unused = tf.zeros_like(d_output)
        with (
            tf.GradientTape() as tape,
            self._block_at(start),
            context.override(is_recomputing=True),
            restoring(remat_policy.SavedProducts(_POLICY), [*saved, unused]),
        ):
            tape.watch([block, *weights])
            output = self.network(self._packed(weights), block)
        upstream: Any = d_output
        found: list[Any] = tape.gradient(
            output,
            [block, *weights],
            output_gradients=upstream,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return found

    @contextlib.contextmanager
    def _block_at(self, start: tf.Tensor) -> Iterator[None]:
        """Sets the context of the block that begins at row `start`; each block has its own key."""
        block = self.context.part(self.context.iteration)
        if block.seed is not None:
            block.seed = random_numbers.hashed_fold_in_word(block.seed, start)
        with context.use(block):
            yield

    def _packed(self, weights: Tensors) -> NestedMap:
        return tf.nest.pack_sequence_as(self.theta, list(weights))


def _write_all(buffers: Tensors, parts: Tensors, start: tf.Tensor) -> list[tf.Tensor]:
    return [write_slice(b, part, start) for b, part in zip(buffers, parts, strict=True)]


def _pad(rows: tf.Tensor, size: int) -> tf.Tensor:
    return tf.pad(rows, [[0, size - rows.shape[0]], [0, 0]])


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is not less than a size."""
    return -(-size // multiple) * multiple
