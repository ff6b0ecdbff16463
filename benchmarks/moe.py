"""Measures mixture-of-experts layers relative to dense layers of the same active FLOPs.

    python -m benchmarks moe --json=moe.json

measures the forward and backward pass of a top-2 mixture-of-experts layer for each number of
--experts and each dispatch, alternating with a dense layer of the same active FLOPs. The loads are
learned, balanced, or skewed: then --skew is the share of all tokens whose first expert is expert 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from lingvo_gshard.core import (
    Layer,
    NestedMap,
    Params,
    Progress,
    context,
    known_sizes,
    layer_method,
)
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers import EinsumDispatch, FeedForward, MixtureOfExperts, Top2Router
from lingvo_gshard.layers.moe import GatherDispatch
from lingvo_gshard.runtime import Array, devices_for, lower
from lingvo_gshard.sharding import Partitioning
from lingvo_gshard.tools.benchmarks import common
from lingvo_gshard.tools.benchmarks.step import products
from lingvo_gshard.tools.benchmarks.timing import in_turns, seconds_of
from lingvo_gshard.tools.console import output, transient_stages
from lingvo_gshard.tools.flags.definitions import comma_list, decimal, integer, maker
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.published_layers.routers import ForcedBalanceRouter

EXPERTS_PER_TOKEN = 2
# Name in the table and in --json -> the dispatch.
_DISPATCHES = {"gather": GatherDispatch, "einsum": EinsumDispatch, "dropless": DroplessDispatch}

define_flags = maker(
    json=output.json_flag(),
    repeats=common.REPEATS,
    gemm_size=common.gemm_size(),
    model_dim=integer("Model dimension of the layers.", 512, 1),
    hidden_dim=integer("Hidden dimension of an expert.", 2048, 1),
    tokens=integer("Tokens of a batch.", 4096, 1),
    group_size=integer("Tokens that are routed together as one group.", 1024, 1),
    experts=comma_list("Numbers of experts.", ["8", "32", "64", "128"]),
    skew=decimal("Share of tokens whose first expert is expert 0 in the skewed loads.", 0.2, 0, 1),
)


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Measures, prints the table, writes the rows, and returns the exit code."""
    experts = common.numbers("experts", values.experts)
    sizes = Sizes(values.model_dim, values.hidden_dim, values.tokens, values.group_size)
    with transient_stages(console, "starting") as progress:
        rows = measure(sizes, experts, values.skew, values.repeats, values.gemm_size, progress)
    caption = "to dense: to the time of a dense layer of the same active FLOPs; routing: share of "
    caption += "all but the experts' products; GEMM: useful FLOPs to the rate of a matrix product; "
    caption += "MiB: of temporaries"
    headings = ("capacity", "ms", "to dense", "routing", "GEMM", "dropped", "MiB")
    cells = [
        (
            f"{row.experts}, {row.dispatch}, {row.load}",
            f"{row.capacity_factor:g}" if row.capacity_factor else "-",
            f"{row.milliseconds:,.0f}",
            f"{row.ratio_to_dense:.2f}",
            f"{row.routing_share:.1%}",
            f"{row.gemm_ratio:.0%}",
            f"{row.dropped_share:.1%}",
            f"{row.temporary_bytes / 2**20:,.0f}",
        )
        for row in rows
    ]
    console.print_rows(("experts, dispatch, load",), headings, cells, caption)
    return common.write(values, rows)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the layers. `tokens` make a batch; `group_size` tokens are routed together."""

    model_dim: int
    hidden_dim: int
    tokens: int
    group_size: int

    @property
    def useful(self) -> int:
        """Returns the useful operations of the experts, forward and backward."""
        rows = EXPERTS_PER_TOKEN * self.tokens
        return 3 * 2 * 2 * rows * self.model_dim * self.hidden_dim


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer to measure.

    Attributes:
      dispatch: how tokens are moved to experts.
      load: "learned" top-2 gates, "balanced" loads, or "skewed" loads.
      capacity_factor: capacity factor of the router; 0 disables the limit.
      skew: for skewed loads, the share of all tokens whose first expert is expert 0.
    """

    experts: int
    dispatch: str
    load: str
    capacity_factor: float
    skew: float = 0.0


@dataclasses.dataclass
class LayerTiming:
    """A measured layer, forward and backward.

    Attributes:
      milliseconds: median time.
      ratio_to_dense: median of the time relative to the dense layer.
      routing_share: share of the time that is not spent in the experts' matrix products.
      gemm_rate: rate of square matrix products, in FLOP/s.
      gemm_ratio: rate of the layer's useful operations relative to gemm_rate.
      dropped_share: share of the token assignments that exceed the capacity.
      peak_bytes: peak memory by XLA's buffer assignment, weights and gradients included.
      temporary_bytes: part of peak_bytes that is neither argument nor result.
    """

    experts: int
    dispatch: str
    load: str
    capacity_factor: float
    milliseconds: float
    dense_milliseconds: float
    ratio_to_dense: float
    routing_share: float
    gemm_rate: float
    gemm_ratio: float
    dropped_share: float
    peak_bytes: int
    temporary_bytes: int


def cases(experts: int, skew: float) -> list[Case]:
    """Returns the layers to measure for a number of experts."""
    # Capacity for all first choices of expert 0 and for its share of the balanced second choices.
    nothing_dropped = skew * experts / EXPERTS_PER_TOKEN + 1.0
    return [
        Case(experts, "gather", "learned", 1.0),
        Case(experts, "einsum", "learned", 1.0),
        Case(experts, "gather", "balanced", 1.0),
        Case(experts, "dropless", "balanced", 0.0),
        Case(experts, "gather", "skewed", nothing_dropped, skew),
        Case(experts, "dropless", "skewed", 0.0, skew),
    ]


class _Identity(Layer):
    """Replaces the experts by the identity, to measure the rest of the layer."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        for name in ("model_dim", "hidden_dim", "num_experts"):
            p.define(name, 0, "The same Params of the experts that it replaces.")
        return p

    @layer_method
    def fprop(self, theta: NestedMap, x_EGCM: tf.Tensor) -> tf.Tensor:
        """Returns its input."""
        return x_EGCM

    @layer_method
    def compute_one(self, theta: NestedMap, x_CM: tf.Tensor) -> tf.Tensor:
        """Returns its input."""
        return x_CM


def layer_params(case: Case, sizes: Sizes) -> Params:
    """Returns the Params of the layer to measure."""
    if case.load == "learned":
        router = Top2Router.params().set(second_expert="all")
    else:
        router = ForcedBalanceRouter.params().set(k=EXPERTS_PER_TOKEN, skew=case.skew)
    return MixtureOfExperts.params().set(
        model_dim=sizes.model_dim,
        hidden_dim=sizes.hidden_dim,
        num_experts=case.experts,
        group_size=sizes.group_size,
        dispatch=_DISPATCHES[case.dispatch].params(),
        router=router.set(capacity_factor=case.capacity_factor),
    )


class Pass:
    """A compiled forward and backward pass of a layer; the gradients are results."""

    def __init__(self, layer: Layer, sizes: Sizes, theta: NestedMap | None = None):
        self._layer, self._sizes = layer, sizes
        self._theta = theta or layer.init(1)
        rng = np.random.default_rng(1)
        shape = (1, sizes.tokens, sizes.model_dim)
        self._x, self._dy = (tf.constant(rng.normal(size=shape), tf.float32) for _ in range(2))
        self._compiled = tf.function(self._compute, jit_compile=True, autograph=False)

    def _compute(self, x_BLM: tf.Tensor, dy_BLM: tf.Tensor, *weights: tf.Tensor) -> list[tf.Tensor]:
        theta = self._theta.pack(weights)
        ones_BL = tf.ones(x_BLM.shape[:2])
        with (
            context.scope(training=True, seed=tf.constant([1, 0])) as scope,
            tf.GradientTape() as tape,
        ):
            sources = [x_BLM, *weights]
            tape.watch(sources)
            y_BLM = self._layer.fprop(theta, x_BLM, ones_BL)
            loss = tf.add_n([tf.reduce_sum(y_BLM * dy_BLM), *scope.losses.values()])
        gradients = tape.gradient(loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        dropped = [v for name, (v, _) in scope.metrics.items() if name.endswith("dropped_share")]
        return [y_BLM, *map(tf.convert_to_tensor, gradients), *dropped]

    def _arguments(self) -> list[tf.Tensor]:
        return [self._x, self._dy, *self._theta.flatten()]

    def run(self) -> list[tf.Tensor]:
        """Runs the pass and waits for its results."""
        results = self._compiled(*self._arguments())
        results[0][0, 0, 0].numpy()
        return results

    def memory(self) -> tuple[int, int]:
        """Returns the peak bytes of the program and the bytes of its temporaries."""
        arguments = self._arguments()
        inputs = [
            Array(f"input_{i}", tuple(known_sizes(x.shape)), x.dtype.name, ((),) * len(x.shape))
            for i, x in enumerate(arguments)
        ]

        def flat(*tensors: tf.Tensor) -> list:
            results = self._compute(*tensors)
            return [(f"output_{i}", tensor, None) for i, tensor in enumerate(results)]

        partitioning = Partitioning.make("data=1", "replicated")
        compiled = lower("layer", flat, inputs, partitioning).lower(devices_for(1)).compile()
        found: Any = compiled.memory_analysis()
        temporary = found.temp_size_in_bytes
        return found.argument_size_in_bytes + found.output_size_in_bytes + temporary, temporary


def dense_pass(sizes: Sizes) -> Pass:
    """Returns the pass of a dense layer with the active FLOPs of two experts per token."""
    hidden = EXPERTS_PER_TOKEN * sizes.hidden_dim
    params = FeedForward.params().set(model_dim=sizes.model_dim, hidden_dim=hidden)
    return Pass(params.set(use_bias=False).instantiate(path="dense"), sizes)


def measure(
    sizes: Sizes,
    experts: Sequence[int],
    skew: float,
    repeats: int,
    gemm_size: int,
    progress: Progress,
) -> list[LayerTiming]:
    """Measures each case; it alternates with three other programs.

    These are a dense layer, the same layer without experts, and square matrix products with as many
    useful operations. Times are medians over `repeats` turns. Ratios are medians of each turn's
    ratio, because the speed of a shared machine changes between turns. `skew` is the share of
    tokens whose first expert is expert 0 in skewed loads.
    """
    dense, (product, _) = dense_pass(sizes), products(gemm_size, sizes.useful)
    dense.run()
    rows = []
    for case in (case for count in experts for case in cases(count, skew)):
        name = f"{case.experts} experts, {case.dispatch}, {case.load}"
        progress.begin(f"compiling {name}")
        params = layer_params(case, sizes)
        whole = Pass(params.instantiate(path="moe"), sizes)
        rest = Pass(params.copy().set(experts=_Identity.params()).instantiate(path="moe"), sizes)
        *_, dropped = whole.run()
        rest.run()
        runs = (whole.run, dense.run, rest.run, product)
        clocks = [functools.partial(seconds_of, each) for each in runs]
        seconds = in_turns(clocks, repeats, progress, f"measuring {name}")
        rows.append(_row(case, sizes, seconds, float(dropped), whole.memory()))
    return rows


def _row(
    case: Case, sizes: Sizes, seconds: np.ndarray, dropped: float, memory: tuple[int, int]
) -> LayerTiming:
    whole, dense, rest, reference = seconds
    numbers = (1e3 * whole, 1e3 * dense, whole / dense, rest / whole, reference, reference / whole)
    ms, dense_ms, to_dense, routing, reference_seconds, gemm = np.median(numbers, 1).tolist()
    rate = sizes.useful / reference_seconds
    layer = case.experts, case.dispatch, case.load, case.capacity_factor
    return LayerTiming(*layer, ms, dense_ms, to_dense, routing, rate, gemm, dropped, *memory)
