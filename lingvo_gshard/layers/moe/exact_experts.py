"""Runs experts on exactly the tokens routed to them, for inference.

Each expert has separate arrays of weights, so that a step reads the weights of the chosen experts
in place. If there are few rows, each row branches to its experts. More rows are sorted by expert,
and each expert computes its own rows block by block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from lingvo_gshard.core import shapes
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.routing import TokenChoiceRouting
from lingvo_gshard.layers.stacks import execution
from lingvo_gshard.sharding import annotate_like
from lingvo_gshard.sharding.partitioning import current_partitioning

LOCAL_LETTERS = {"k": "choices of a token", "r": "rows: one for each choice of each token"}

# With more experts, their weights stay stacked: a program would grow with their number.
_MOST_EXPERTS = 64

# Up to this many rows branch to their experts one by one.
_FEW_ROWS = 4
# Up to this many rows are sorted by comparing all pairs, which is faster than XLA's sort.
_COMPARED_ROWS = 1024
_BLOCKS = (8, 16, 32, 64)

# Maps one expert's weights and rows [C,M] to outputs [C,M].
Network: TypeAlias = "Callable[[NestedMap, tf.Tensor], tf.Tensor]"


def is_possible(num_experts: int, path: str) -> bool:
    """Returns whether each expert can compute its tokens alone.

    Experts cannot if they are many, or if a strategy splits experts or tokens over devices.

    Args:
      num_experts: the number of experts.
      path: path of the mixture of experts.
    """
    current = current_partitioning()
    is_split = current is not None and any(
        current.parts(current.split(letter, path=path)[0]) > 1 for letter in "EG"
    )
    return num_experts <= _MOST_EXPERTS and not is_split


def separate(experts: Experts, theta: NestedMap) -> list[NestedMap]:
    """Returns the weights of each expert for inference.

    Args:
      experts: the experts.
      theta: their weights, stacked.
    """
    specs = experts.variable_specs().flatten()
    layouts = [dataclasses.replace(spec, layout=spec.layout[1:]) for spec in specs]
    return [
        experts.decoding_weights(
            theta.pack(
                annotate_like(w[i], spec) for w, spec in zip(theta.flatten(), layouts, strict=True)
            ),
            is_one=True,
        )
        for i in range(experts.p.num_experts)
    ]


def run_routing(
    experts: Experts, weights: Sequence[NestedMap], routing: TokenChoiceRouting, x_TM: tf.Tensor
) -> tf.Tensor:
    """Returns [T,M]: the output of the experts that a routing gives each token.

    Args:
      experts: the experts.
      weights: the weights of each expert, from `separate`.
      routing: the routing of one group, which has all tokens.
      x_TM: the tokens.
    """
    choices = [
        (tf.where(a.kept_GS, a.expert_GS, routing.num_experts)[0], a.gate_GS[0])
        for a in routing.assignments
    ]
    expert_kT, gate_kT = map(tf.stack, zip(*choices, strict=True))
    return run_experts(experts.compute_one, weights, x_TM, expert_kT, gate_kT)


def run_experts(
    network: Network,
    experts: Sequence[NestedMap],
    x_TM: tf.Tensor,
    expert_kT: tf.Tensor,
    gate_kT: tf.Tensor,
) -> tf.Tensor:
    """Returns [T,M]: each token's gate-weighted sum of its experts' outputs, in the type of x.

    Args:
      network: one expert.
      experts: the weights of each expert.
      x_TM: the tokens.
      expert_kT: int32, the expert of each choice; the number of experts where there is none.
      gate_kT: float32, the gate of each choice.
    """
    choices, tokens = expert_kT.shape
    gate_kT1 = tf.cast(gate_kT, x_TM.dtype)[..., None]
    if choices * tokens <= _FEW_ROWS:
        y_kTM = _branch(network, experts, x_TM, expert_kT)
    else:
        y_kTM = _run_sorted(network, experts, x_TM, expert_kT)
    return tf.reduce_sum(tf.where(gate_kT1 > 0, y_kTM, 0.0) * gate_kT1, 0)


def _branch(
    network: Network, experts: Sequence[NestedMap], x_TM: tf.Tensor, expert_kT: tf.Tensor
) -> tf.Tensor:
    """Returns each choice's output [k,T,M]. Each row branches to its expert."""
    choices, tokens = expert_kT.shape

    def run(row_1M: tf.Tensor, expert: tf.Tensor) -> tf.Tensor:
        branches = [lambda weights=weights: network(weights, row_1M) for weights in experts]
        branches.append(lambda: tf.zeros_like(row_1M))
        return tf.switch_case(expert, branches)

    outputs = [
        tf.concat([run(x_TM[t : t + 1], expert_kT[k, t]) for t in range(tokens)], 0)
        for k in range(choices)
    ]
    return tf.stack(outputs)


def _run_sorted(
    network: Network, experts: Sequence[NestedMap], x_TM: tf.Tensor, expert_kT: tf.Tensor
) -> tf.Tensor:
    """Returns each choice's output [k,T,M]. Rows are sorted by expert."""
    choices, tokens = expert_kT.shape
    count, rows = len(experts), choices * tokens
    expert_r = tf.reshape(expert_kT, [rows])
    chosen_rE = tf.one_hot(expert_r, count)
    load_E = tf.cast(tf.reduce_sum(chosen_rE, 0), tf.int32)
    start_E = tf.cumsum(load_E, exclusive=True)
    order_r, position_r = _sort(expert_r)
    block = _block_size(rows, count)
    # The last block of an expert may reach into rows of the next one, which come later.
    x_rM = tf.pad(tf.gather(x_TM, order_r % tokens), [[0, block], [0, 0]])
    y_rM = tf.zeros_like(x_rM)
    for index, weights in enumerate(experts):
        # The number of iterations with balanced loads. The first experts then have one row more.
        even_load = rows // count + (index < rows % count)
        name = execution.loop_name(-(-even_load // block))
        run = functools.partial(_run_blocks, network, weights, block=block, name=name)
        y_rM = run(x_rM, y_rM, start_E[index], load_E[index])
    return tf.reshape(tf.gather(y_rM, position_r), [choices, tokens, -1])


def _run_blocks(
    network: Network,
    weights: NestedMap,
    x_rM: tf.Tensor,
    y_rM: tf.Tensor,
    start: tf.Tensor,
    load: tf.Tensor,
    block: int,
    name: str,
) -> tf.Tensor:
    """Returns y with one expert's outputs in its rows and, up to a block, in the rows after."""

    def is_running(done: tf.Tensor, y_rM: tf.Tensor) -> tf.Tensor:
        del y_rM
        return done < load

    def run(done: tf.Tensor, y_rM: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x_CM = shapes.read_slice(x_rM, start + done, block)
        return done + block, shapes.write_slice(y_rM, network(weights, x_CM), start + done)

    return tf.while_loop(is_running, run, (tf.constant(0), y_rM), name=name)[1]


def _block_size(rows: int, experts: int) -> int:
    """Returns the rows of a block: about half of a balanced load."""
    half = rows // (2 * experts)
    return next((size for size in _BLOCKS if size >= half), _BLOCKS[-1])


def _sort(expert_r: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows in order of their experts, and the position of each row in that order.

    Rows of one expert keep their order.
    """
    (rows,) = expert_r.shape
    if rows > _COMPARED_ROWS:
        order_r = tf.argsort(expert_r, stable=True)
        return order_r, tf.argsort(order_r)
    index_r = tf.range(rows)
    one, other = expert_r[:, None], expert_r[None, :]
    is_before = (other < one) | (tf.equal(other, one) & (index_r[None, :] < index_r[:, None]))
    position_r = tf.reduce_sum(tf.cast(is_before, tf.int32), 1)
    is_at = tf.equal(position_r[None, :], index_r[:, None])
    order_r = tf.reduce_sum(tf.where(is_at, index_r[None, :], 0), 1)
    return order_r, position_r
