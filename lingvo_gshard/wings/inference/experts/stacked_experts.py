"""Runs experts with stacked weights, block by block, and reads the experts that have rows only.

Rows are sorted by expert and cut into blocks of one expert each. A single loop computes the blocks.
An iteration slices the weights of its expert out of the stack, and XLA for TPUs and GPUs fuses that
slice into the product that reads it, so that the other experts stay untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from lingvo_gshard.core import NestedMap, scopes, shapes, tf
from lingvo_gshard.layers import count_rows, sort_rows

LOCAL_LETTERS = {
    "k": "choices of a token",
    "r": "rows: one for each choice of each token",
    "b": "blocks of rows",
}

# Maps one expert's weights and rows [C,M] to outputs [C,M].
Network: TypeAlias = "Callable[[NestedMap, tf.Tensor], tf.Tensor]"

_BLOCKS = (8, 16, 32, 64, 128, 256, 512)
# Accelerators read an expert's weights for so many rows without waiting for the products.
_READING_ROWS = 128


def run(
    network: Network,
    weights: NestedMap,
    x_TM: tf.Tensor,
    expert_kT: tf.Tensor,
    even_experts: int = 0,
) -> tf.Tensor:
    """Returns the output of each choice [k,T,M]; undefined where there is no expert.

    Args:
      network: one expert.
      weights: the weights of all experts, which have E first.
      expert_kT: int32, the expert of each choice; E or more where there is none.
      even_experts: the experts that balanced routing spreads the choices over, for planning and
        the size of blocks; 0 for E.
    """
    choices, tokens = expert_kT.shape
    rows, count = choices * tokens, weights.flatten()[0].shape[0]
    even_experts = even_experts or count
    block = block_rows(rows / even_experts)
    expert_r = tf.reshape(expert_kT, [rows])
    order_r, position_r = sort_rows(expert_r, count)
    blocks, expert_b, start_b = _blocks(expert_r, count, block)
    if tokens == 1 and count == even_experts:
        # A token has a block for each choice. XLA for GPUs asks the host before each iteration of a
        # loop whose end depends on data.
        blocks = tf.constant(choices)
    # The last block of an expert may reach into rows of the next one, which come later.
    x_rM = tf.pad(tf.gather(x_TM, order_r % tokens), [[0, block], [0, 0]])

    def compute(index: tf.Tensor, y_rM: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        expert, start = tf.gather(expert_b, index), tf.gather(start_b, index)
        own = weights.transform(lambda w: tf.squeeze(shapes.read_slice(w, expert, 1), 0))
        y_CM = network(own, shapes.read_slice(x_rM, start, block))
        return index + 1, shapes.write_slice(y_rM, y_CM, start)

    trips = count * expected_blocks(tokens, min(choices / even_experts, 1.0), block)
    _, y_rM = tf.while_loop(
        lambda index, _: index < blocks,
        compute,
        (tf.constant(0), tf.zeros_like(x_rM)),
        name=scopes.loop_name(max(round(trips), 1)),
    )
    return tf.reshape(tf.gather(y_rM, position_r), [choices, tokens, -1])


def run_grouped(
    compute: Callable[[NestedMap, tf.Tensor, tf.Tensor, int], tf.Tensor],
    weights: NestedMap,
    x_TM: tf.Tensor,
    expert_kT: tf.Tensor,
    even_experts: int = 0,
) -> tf.Tensor:
    """Returns what `run` returns, by the platform's kernel of grouped products.

    `compute` is called as `sorted_experts.compute_sorted`.
    """
    choices, tokens = expert_kT.shape
    rows, count = choices * tokens, weights.flatten()[0].shape[0]
    usual_rows = -(-rows * count // (even_experts or count))
    expert_r = tf.reshape(expert_kT, [rows])
    order_r, position_r = sort_rows(expert_r, count)
    load_E = count_rows(expert_r, count)
    y_rM = compute(weights, tf.gather(x_TM, order_r % tokens), load_E, usual_rows)
    return tf.reshape(tf.gather(y_rM, position_r), [choices, tokens, -1])


def block_rows(even_load: float) -> int:
    """Returns the rows of a block.

    An expert with few rows should compute them in one block, so that its weights are read once.
    With many rows, the padding of its last block should be small.
    """
    wanted = min(2 * even_load, max(_READING_ROWS, even_load / 2))
    return next((size for size in _BLOCKS if size >= wanted), _BLOCKS[-1])


def expected_blocks(tokens: int, probability: float, block: int) -> float:
    """Returns the mean number of blocks of an expert that tokens choose independently.

    With one block for any number of rows it is the probability that an expert has a row at all,
    1 - (1 - probability)^tokens.
    """
    if probability >= 1:
        return -(-tokens // block)
    # The logarithms of the binomial distribution's probabilities, each from the one before.
    n = np.arange(tokens)
    steps = np.log(tokens - n) - np.log(n + 1) + np.log(probability / (1 - probability))
    logs = tokens * np.log1p(-probability) + np.concatenate([[0.0], np.cumsum(steps)])
    loads = np.arange(tokens + 1)
    return float(np.sum(np.exp(logs) * -(-loads // block)))


def _blocks(
    expert_r: tf.Tensor, num_experts: int, block: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the number of blocks, and the expert and the first sorted row of each; int32."""
    load_E = count_rows(expert_r, num_experts)
    start_E = tf.cumsum(load_E, exclusive=True)
    blocks_E = (load_E + block - 1) // block
    after_E = tf.cumsum(blocks_E)
    (rows,) = expert_r.shape
    # An expert with rows has at most one block that is not full.
    index_b = tf.range(rows // block + min(num_experts, rows))
    expert_b = tf.reduce_sum(tf.cast(index_b[:, None] >= after_E[None], tf.int32), 1)
    expert_b = tf.minimum(expert_b, num_experts - 1)
    within_b = index_b - tf.gather(after_E - blocks_E, expert_b)
    return after_E[-1], expert_b, tf.gather(start_E, expert_b) + within_b * block
