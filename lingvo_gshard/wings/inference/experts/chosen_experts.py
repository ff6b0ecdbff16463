"""Runs experts on all tokens that chose them, for inference.

A step reads the weights of the experts that its tokens chose, and no others. There are two forms:

- Stacked weights [E,...]. One loop over blocks of rows reads the weights of the block's expert in
  place. Programs for TPUs use it, and all others that have many experts. XLA for GPUs asks the host
  before each iteration, and copies the weights of large experts. There, the kernel of grouped
  products takes the place of the loop, unless the weights are int8 or have adapters.
- Separate arrays for each expert. XLA for CPU would copy an expert out of a stack before it
  multiplies by it. If there are few rows, each row branches to its experts. More rows are sorted by
  expert, and each expert computes its own rows block by block.

On a mesh each device has a part of every weight; see `split_experts`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from lingvo_gshard.core import NestedMap, layer_method, scopes, shapes, tf
from lingvo_gshard.layers import Experts, TokenChoiceRouting, count_rows, sort_rows
from lingvo_gshard.sharding import hardware_of, platform_in_use
from lingvo_gshard.wings.dropless import sorted_experts
from lingvo_gshard.wings.inference.experts import stacked_experts
from lingvo_gshard.wings.inference.experts.split_experts import SplitExperts
from lingvo_gshard.wings.inference.experts.stacked_experts import Network
from lingvo_gshard.wings.inference.stored_weights import store

LOCAL_LETTERS = {"k": "choices of a token", "r": "rows: one for each choice of each token"}

# With more experts, their weights stay stacked: a program would grow with their number.
_MOST_SEPARATE = 64

# Up to this many rows branch to their experts one by one.
_FEW_ROWS = 4
_BLOCKS = (8, 16, 32, 64)


def prepare(experts: Experts, theta: NestedMap) -> NestedMap | list[NestedMap]:
    """Returns the weights for `run_routing`: one stack of all experts, or a tree for each."""
    region = SplitExperts.for_experts(experts)
    is_many = experts.p.num_experts > _MOST_SEPARATE
    if platform_in_use() or region.expert_axes or is_many:
        return region.place(stored(experts, theta))
    return [
        region.place(stored(experts, theta.transform(lambda w, i=i: w[i]), is_one=True))
        for i in range(experts.p.num_experts)
    ]


@layer_method
def stored(experts: Experts, theta: NestedMap, is_one: bool = False) -> NestedMap:
    """Returns the stored weights of experts, or of one expert without the dimension E."""
    first = "" if is_one else "E"
    weights = NestedMap(theta, w_out=store(theta.w_out, f"{first}HM", "H"))
    for name in experts.input_products:
        weights[f"w_{name}"] = store(theta[f"w_{name}"], f"{first}MH", "M")
    return weights


def run_routing(
    experts: Experts,
    weights: NestedMap | Sequence[NestedMap],
    routing: TokenChoiceRouting,
    x_GSM: tf.Tensor,
) -> tf.Tensor:
    """Returns [G,S,M]: `run_experts` with the weights that `prepare` made."""
    region = SplitExperts.for_experts(experts)
    compute = functools.partial(run_experts, experts, even_experts=routing.num_experts)
    return region.run(compute, weights, routing, x_GSM)


def run_experts(
    experts: Experts,
    weights: NestedMap | Sequence[NestedMap],
    x_TM: tf.Tensor,
    expert_kT: tf.Tensor,
    gate_kT: tf.Tensor,
    even_experts: int = 0,
) -> tf.Tensor:
    """Returns [T,M]: each token's gate-weighted sum of its experts' outputs, in the type of x.

    Args:
      weights: the weights of each expert, or one stack of the weights of all experts.
      expert_kT: int32, the expert of each choice; the number of experts where there is none.
      gate_kT: float32, the gate of each choice; 0 where there is none.
      even_experts: the experts that balanced routing spreads the choices over, if other devices
        have more of them; 0 for those given.
    """
    choices, tokens = expert_kT.shape
    gate_kT1 = tf.cast(gate_kT, x_TM.dtype)[..., None]
    network = experts.compute_one
    if isinstance(weights, NestedMap) and _has_kernel(weights, x_TM, choices):
        y_kTM = stacked_experts.run_grouped(
            functools.partial(sorted_experts.compute_sorted, experts),
            weights,
            x_TM,
            expert_kT,
            even_experts,
        )
    elif isinstance(weights, NestedMap):
        y_kTM = stacked_experts.run(network, weights, x_TM, expert_kT, even_experts)
    elif choices * tokens <= _FEW_ROWS:
        y_kTM = _branch(network, weights, x_TM, expert_kT)
    else:
        y_kTM = _run_sorted(network, weights, x_TM, expert_kT)
    return tf.reduce_sum(tf.where(gate_kT1 > 0, y_kTM, 0.0) * gate_kT1, 0)


def _has_kernel(weights: NestedMap, x_TM: tf.Tensor, choices: int) -> bool:
    """Returns whether the kernel of grouped products computes the experts of a step."""
    if hardware_of(platform_in_use()) != "cuda":
        return False
    rows = choices * x_TM.shape[0]
    return bool(sorted_experts.platform_for(rows, x_TM.dtype, weights))


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
    load_E = count_rows(expert_r, count)
    start_E = tf.cumsum(load_E, exclusive=True)
    order_r, position_r = sort_rows(expert_r, count)
    block = _block_size(rows, count)
    # The last block of an expert may reach into rows of the next one, which come later.
    x_rM = tf.pad(tf.gather(x_TM, order_r % tokens), [[0, block], [0, 0]])
    y_rM = tf.zeros_like(x_rM)
    for index, weights in enumerate(experts):
        # The number of iterations with balanced loads. The first experts then have one row more.
        even_load = rows // count + (index < rows % count)
        name = scopes.loop_name(-(-even_load // block))
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
