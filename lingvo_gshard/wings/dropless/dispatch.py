"""Dropless dispatch: experts compute every token sent to them, without capacity or padding.

It follows MegaBlocks (Gale et al. 2022, arXiv 2211.15841). The rows of all groups are sorted by
expert, and each expert computes exactly its rows: by grouped products of the platform
(wings/kernels/grouped.py), or in blocks where the platform has none (expert_blocks.py).

On a mesh this is a manual region. An exchange brings the rows of all devices to the devices of
their experts (exchanges.py), which compute them as a single device would, and brings the outputs
back.

A device holds a part of the groups and of the experts. Weights that the strategy splits along
other letters are gathered before the region, and their gradients are scattered after it.
"""

from __future__ import annotations

import dataclasses
import math

from lingvo_gshard.core import (
    Context,
    NestedMap,
    Params,
    UserError,
    context,
    names,
    random_numbers,
    tf,
)
from lingvo_gshard.layers import Dispatch, Exchange, Experts, TokenChoiceRouting, token_context
from lingvo_gshard.sharding import (
    annotate_weights,
    collectives,
    current_partitioning,
    manual,
    mesh_in_use,
    platform_in_use,
    resolve,
)
from lingvo_gshard.wings.dropless.exchanges import (
    EXCHANGES,
    Axes,
    RowExchange,
    count_devices,
    exchange_class,
)
from lingvo_gshard.wings.dropless.expert_blocks import round_up
from lingvo_gshard.wings.dropless.rounds import Rounds

LOCAL_LETTERS = {"k": "choices of a token"}

# Rows over the bound are computed in further rounds, or dropped.
COMPUTE, DROP = "compute", "drop"

# Purpose of the random key for dropout in the region.
_PURPOSE = "dropless"


@dataclasses.dataclass(frozen=True)
class ExpertRegion:
    """The manual region of one layer.

    Attributes:
      group_axes: mesh axes that split the groups.
    """

    experts: Experts
    dispatch: DroplessDispatch
    options: Exchange
    group_axes: Axes = dataclasses.field(default_factory=lambda: resolve("GSM", 3)[0])

    @property
    def expert_axes(self) -> Axes:
        """The axes among `group_axes` that also split the experts.

        Along axes that split experts but not groups, every device has all experts.
        """
        return tuple(axis for axis in resolve("EGCM", 4)[0] if axis in self.group_axes)

    def run(
        self, x_GSM: tf.Tensor, expert_kGS: tf.Tensor, gate_kGS: tf.Tensor, theta: NestedMap
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes the experts' outputs on all devices.

        Groups and experts that do not divide evenly over the devices are padded.

        Args:
          expert_kGS: int32, the expert of each choice; num_experts or more where there is none.
          gate_kGS: float32, the gate of each choice.

        Returns:
          [G,S,M], the gate-weighted sums; and the number of rows over the bound, a float32 scalar.
        """
        groups = x_GSM.shape[0]
        group_parts, expert_parts = map(count_devices, (self.group_axes, self.expert_axes))
        num_experts = self.experts.p.num_experts
        padded_experts = round_up(num_experts, expert_parts)
        expert_kGS = tf.where(expert_kGS < num_experts, expert_kGS, padded_experts)
        padding = round_up(groups, group_parts) - groups
        expert_kGS = tf.pad(
            expert_kGS, [[0, 0], [0, padding], [0, 0]], constant_values=padded_experts
        )
        gate_kGS = tf.pad(gate_kGS, [[0, 0], [0, padding], [0, 0]])
        # Weights are split after the cast, too, so that they are gathered in 16 bits.
        cast = annotate_weights(
            theta.transform(lambda weight: tf.cast(weight, x_GSM.dtype)),
            self.experts.variable_specs(),
        )
        weights = [_pad_experts(weight, padded_experts) for weight in tf.nest.flatten(cast)]
        outer = context.current()
        exchange = self._exchange(expert_kGS.shape[0], padded_experts)

        def on_device(x_GSM, expert_kGS, gate_kGS, seed, *weights):
            tokens = math.prod(x_GSM.shape[:2])
            x_TM = tf.reshape(x_GSM, [tokens, x_GSM.shape[-1]])
            by_choice = [expert_kGS.shape[0], tokens]
            expert_kT, gate_kT = (tf.reshape(x, by_choice) for x in (expert_kGS, gate_kGS))
            theta_E = tf.nest.pack_sequence_as(theta, weights)
            device_context = dataclasses.replace(
                outer.part(), seed=self._device_seed(seed), on_output=None
            )
            without_tokens = {"ids": None, "group_order": None}
            with context.use(device_context), token_context.override(**without_tokens):
                y_TM, over_bound = self._compute(exchange, x_TM, expert_kT, gate_kT, theta_E)
            return tf.reshape(y_TM, x_GSM.shape), over_bound[tf.newaxis]

        by_group, by_choice = (self.group_axes, (), ()), ((), self.group_axes, ())
        by_expert = [(self.expert_axes, *[()] * (w.shape.rank - 1)) for w in weights]
        splits = [by_group, by_choice, by_choice, ((),), *by_expert]
        region = manual(on_device, splits, [by_group, ((),)])
        seed = self._seed(outer)
        y_GSM, over_bound = region(
            tf.pad(x_GSM, [[0, padding], [0, 0], [0, 0]]), expert_kGS, gate_kGS, seed, *weights
        )
        return y_GSM[:groups], over_bound[0]

    def _compute(
        self,
        exchange: RowExchange,
        x_TM: tf.Tensor,
        expert_kT: tf.Tensor,
        gate_kT: tf.Tensor,
        theta: NestedMap,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes one device's tokens, in rounds or without the rows over the bound.

        Returns:
          [T,M], the gate-weighted sums; and the number of rows over the bound on all devices.
        """
        # A device has no more than the rows of all devices of its group.
        if not 0 < exchange.bound < exchange.devices:
            return exchange.compute(x_TM, expert_kT, gate_kT, theta)[0], tf.constant(0.0)
        if self.dispatch.p.over_bound == COMPUTE:
            return Rounds(exchange, self.group_axes, theta).compute(x_TM, expert_kT, gate_kT)
        y_TM, left = exchange.compute(x_TM, expert_kT, gate_kT, theta)
        return y_TM, collectives.psum(left, self.group_axes)

    def _exchange(self, choices: int, padded_experts: int) -> RowExchange:
        p, devices = self.dispatch.p, count_devices(self.expert_axes)
        path = f"{self.dispatch.path}.exchange"
        cls = exchange_class(
            p.exchange, platform_in_use(), devices, choices, p.bound, self.options.p, path
        )
        bound = p.bound if devices > 1 else 0.0
        return cls(self.experts, self.expert_axes, padded_experts, bound, self.options)

    def _seed(self, outer: Context) -> tf.Tensor:
        """Returns the int32 [2] key of this layer's dropout, or zeros without dropout."""
        if not (outer.training and self.experts.p.dropout_rate):
            return tf.zeros([2], tf.int32)
        return outer.random_seed(f"{context.layer_path()}/{_PURPOSE}")

    def _device_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """Returns the key of one device: devices with different rows draw different numbers."""
        if not self.experts.p.dropout_rate:
            return seed
        for axis in self.group_axes:
            seed = random_numbers.hashed_fold_in_word(seed, collectives.axis_index(axis))
        return seed


def _pad_experts(weight: tf.Tensor, num_experts: int) -> tf.Tensor:
    """Returns a weight [E,...] padded with zeros to `num_experts` experts."""
    padding = num_experts - weight.shape[0]
    return tf.pad(weight, [[0, padding], *[[0, 0]] * (weight.shape.rank - 1)])


class DroplessDispatch(Dispatch):
    """Sorts rows by expert. Each expert computes exactly the rows sent to it."""

    is_dropless = True
    is_vectorizable = False
    has_manual_regions = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "bound",
            2.0,
            "On a mesh, the rows that a device can send to another device at once, as a multiple "
            "of the number under balanced loads; with the `gathered` exchange, those that a device "
            "can compute. 0: no bound, but room for all rows.",
            minimum=0,
        )
        p.define(
            "over_bound",
            COMPUTE,
            "What happens to the rows over `bound`: `compute` exchanges and computes them in "
            "further rounds, `drop` leaves them out.",
        )
        p.define(
            "exchange",
            "",
            "How rows reach the devices of their experts: `gathered`, `fixed` or `ragged`; empty: "
            "by the devices, see docs/moe.md.",
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.exchange:
            names.check(p.exchange, EXCHANGES, f"{path}.exchange: {p.exchange!r}")
        names.check(p.over_bound, [COMPUTE, DROP], f"{path}.over_bound: {p.over_bound!r}")
        if p.over_bound == DROP and not p.bound:
            raise UserError(
                f"{path}.over_bound={DROP!r} drops the rows over {path}.bound, which is 0, no "
                f"bound; expected a positive bound, or over_bound={COMPUTE!r}"
            )

    def check_exchange(self, exchange: Params, path: str) -> None:
        """Raises UserError if an option needs an exchange that this dispatch does not name.

        Rounding changes results, which must not depend on the default of the devices.
        """
        named, steps = self.p.exchange, ("gathered", "fixed")
        needs = {"precision": [*EXCHANGES], "hierarchical": steps}
        for name, exchanges in needs.items():
            value = exchange.get(name)
            if value != exchange.default(name) and named not in exchanges:
                raise UserError(
                    f"{path}.{name}={value!r} needs an exchange by name: {self.path}.exchange is "
                    f"{named!r}; set it to {' or '.join(map(repr, exchanges))}, or reset "
                    f"{path}.{name}"
                )

    def run(
        self,
        routing: TokenChoiceRouting,
        x_GSM: tf.Tensor,
        experts: Experts,
        theta: NestedMap,
        exchange: Exchange,
    ) -> tf.Tensor:
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs, in x's dtype.

        On a mesh, with a bound, it reports the metric `over_bound_share`: the share of rows that
        were computed in further rounds, or dropped.
        """
        assignments, num_experts = routing.assignments, routing.num_experts
        expert_kGS = tf.stack([tf.where(a.kept_GS, a.expert_GS, num_experts) for a in assignments])
        gate_kGS = tf.stack([a.gate_GS for a in assignments])
        if current_partitioning() is None or mesh_in_use() is None:
            cls = exchange_class(self.p.exchange, "", 1, len(assignments), 0.0, exchange.p, "")
            own = cls(experts, (), num_experts, 0.0, exchange)
            return _run_on_one_device(x_GSM, expert_kGS, gate_kGS, own, theta)
        exchange.transport()  # Raises the error of a mesh without two axes.
        region = ExpertRegion(experts, self, exchange)
        y_GSM, over_bound = region.run(x_GSM, expert_kGS, gate_kGS, theta)
        if self.p.bound:
            rows = tf.reduce_sum(tf.cast(expert_kGS < num_experts, tf.float32))
            name = f"{context.layer_path()}/over_bound_share"
            context.current().add_metric(name, over_bound / tf.maximum(rows, 1.0), rows)
            if self.p.over_bound == DROP and token_context.current().on_routing is not None:
                context.current().add_sum(f"{context.layer_path()}/over_bound", over_bound)
        return y_GSM


def _run_on_one_device(
    x_GSM: tf.Tensor, expert_kGS: tf.Tensor, gate_kGS: tf.Tensor, own: RowExchange, theta: NestedMap
) -> tf.Tensor:
    choices, groups, size = expert_kGS.shape.as_list()
    expert_kT, gate_kT = (tf.reshape(x, [choices, groups * size]) for x in (expert_kGS, gate_kGS))
    x_TM = tf.reshape(x_GSM, [groups * size, x_GSM.shape[-1]])
    return tf.reshape(own.compute(x_TM, expert_kT, gate_kT, theta)[0], x_GSM.shape)
