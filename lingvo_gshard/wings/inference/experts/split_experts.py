"""Splits the work of experts in inference over a mesh, in a manual region.

A device has a part of the experts, a part of the hidden units of each, or both. The tokens of all
devices that share an expert's weights are gathered: tokens of a step of decoding are few, and take
less to move than buffers for the worst load. Each device computes its own part for the tokens that
chose its experts, and the parts are summed where the tokens came from.

Weights that a strategy splits along M are split along H here. `place` moves them when decoding is
prepared, so that no step moves weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

from lingvo_gshard.core import NestedMap, known_sizes, tf
from lingvo_gshard.layers import Experts, TokenChoiceRouting
from lingvo_gshard.sharding import (
    Mesh,
    Split,
    collectives,
    current_partitioning,
    even,
    manual,
    mesh_in_use,
    resolve,
    use_partitioning,
    xla,
)

LOCAL_LETTERS = {"k": "choices of a token", "c": "an expert and a gate for each choice"}

Axes = tuple[str, ...]
# No host has more GPUs, so that a larger mesh has links between hosts.
_DEVICES_OF_A_HOST = 8
# (weights, x_TM, expert_kT, gate_kT) -> y_TM
Compute: TypeAlias = "Callable[[Any, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]"


@dataclasses.dataclass(frozen=True)
class SplitExperts:
    """The part of each device: which mesh axes split the experts, and the hidden units of each."""

    experts: Experts
    mesh: Mesh | None = None
    expert_axes: Axes = ()
    hidden_axes: Axes = ()

    @classmethod
    def for_experts(cls, experts: Experts) -> SplitExperts:
        """Returns the parts under the current partitioning."""
        current = current_partitioning()
        if current is None or current.mesh.size == 1:
            return cls(experts)
        spec = experts.variable_specs().w_out
        wanted, *others = current.spec_split(spec)
        mesh, free = current.mesh, [axis for axes in others for axis in axes]
        hidden_axes = even(experts.p.hidden_dim, free, mesh)
        # Axes that do not divide the one divide the other, or leave the weights whole.
        free = [*wanted, *(axis for axis in free if axis not in hidden_axes)]
        expert_axes = even(experts.p.num_experts, free, mesh)
        free = [*hidden_axes, *(axis for axis in wanted if axis not in expert_axes)]
        hidden_axes = even(experts.p.hidden_dim, free, mesh)
        return cls(experts, mesh, expert_axes, hidden_axes)

    def place(self, weights: NestedMap) -> NestedMap:
        """Returns weights for inference, annotated with their split."""
        mesh = self.mesh
        if mesh is None:
            return weights
        splits = self._splits(weights)
        leaves = weights.flatten()
        return weights.pack(xla.tile(w, s, mesh) for w, s in zip(leaves, splits, strict=True))

    def run(
        self,
        compute: Compute,
        weights: NestedMap | Sequence[NestedMap],
        routing: TokenChoiceRouting,
        x_GSM: tf.Tensor,
    ) -> tf.Tensor:
        """Returns [G,S,M]: the gate-weighted sum of the outputs of each token's experts."""
        groups = _group_axes(known_sizes(x_GSM.shape)[0])
        trees = [weights] if isinstance(weights, NestedMap) else weights

        def on_device(x_GSM: tf.Tensor, choice_cGS: tf.Tensor, *shards: tf.Tensor) -> tf.Tensor:
            rest = iter(shards)
            own = [self._with_one_bias(tree.transform(lambda _: next(rest))) for tree in trees]
            of_device = own[0] if isinstance(weights, NestedMap) else own
            return self._run_on_device(compute, of_device, groups, x_GSM, choice_cGS)

        by_group = (groups, (), ())
        splits = [split for tree in trees for split in self._splits(tree)]
        region = manual(on_device, [by_group, ((), groups, ()), *splits], by_group)
        arrays = [array for tree in trees for array in tree.flatten()]
        return cast(tf.Tensor, region(x_GSM, _choices(routing), *arrays))

    def _run_on_device(
        self,
        compute: Compute,
        weights: NestedMap | Sequence[NestedMap],
        groups: Axes,
        x_GSM: tf.Tensor,
        choice_cGS: tf.Tensor,
    ) -> tf.Tensor:
        """Returns the outputs [G,S,M] of this device's tokens, computed on all devices."""
        of_weights = (*self.expert_axes, *self.hidden_axes)
        shared = tuple(axis for axis in groups if axis in of_weights)
        *groups_and_rows, model_dim = known_sizes(x_GSM.shape)
        tokens = math.prod(groups_and_rows)
        others = tuple(axis for axis in of_weights if axis not in shared)
        near = self._near_axes(shared, others, model_dim)
        x_TM = self._own_columns(tf.reshape(x_GSM, [tokens, model_dim]), near)
        x_TM = collectives.all_gather(collectives.all_gather(x_TM, shared, 0), near, 1)
        choice_cT = tf.reshape(choice_cGS, [choice_cGS.shape[0], tokens])
        expert_kT, gate_kT = tf.split(collectives.all_gather(choice_cT, shared, 1), 2)
        local = self.experts.p.num_experts // self._parts(self.expert_axes)
        expert_kT = tf.cast(expert_kT, tf.int32) - collectives.place_along(self.expert_axes) * local
        is_own_kT = (expert_kT >= 0) & (expert_kT < local)
        y_TM = compute(
            weights, x_TM, tf.where(is_own_kT, expert_kT, local), tf.where(is_own_kT, gate_kT, 0.0)
        )
        y_TM = collectives.reduce_scatter(y_TM, near, 1)
        y_TM = collectives.reduce_scatter(y_TM, shared, 0)
        y_TM = collectives.psum(y_TM, tuple(axis for axis in others if axis not in near))
        return tf.reshape(collectives.all_gather(y_TM, near, 1), x_GSM.shape)

    def _near_axes(self, shared: Axes, others: Axes, model_dim: int) -> Axes:
        """Returns the axes that split the columns of tokens while they travel along `shared`.

        Devices along `others` have the same tokens. They would all send them, over slow links where
        there are several hosts. Each sends a part of the columns in place of that. On few devices
        the collectives that this adds take longer.
        """
        mesh = self.mesh
        if mesh is None or not shared or mesh.size <= _DEVICES_OF_A_HOST:
            return ()
        return even(model_dim, others, mesh)

    def _own_columns(self, x_TM: tf.Tensor, axes: Axes) -> tf.Tensor:
        """Returns this device's columns of rows that all devices along axes have."""
        rows, columns = known_sizes(x_TM.shape)
        columns //= self._parts(axes)
        return tf.slice(x_TM, [0, collectives.place_along(axes) * columns], [rows, columns])

    def _with_one_bias(self, weights: NestedMap) -> NestedMap:
        """Returns weights whose output bias is 0 on all devices but one that sum their outputs."""
        if "b_out" not in weights or not self.hidden_axes:
            return weights
        is_first = tf.equal(collectives.place_along(self.hidden_axes), 0)
        return NestedMap(weights, b_out=weights.b_out * tf.cast(is_first, weights.b_out.dtype))

    def _parts(self, axes: Axes) -> int:
        return self.mesh.parts(axes) if self.mesh else 1

    def _splits(self, weights: NestedMap) -> list[Split]:
        """Returns the split of each array, of stacked weights or of one expert's."""
        specs = dict(self.experts.variable_specs().flatten_items())
        sizes = {"E": self.experts.p.num_experts, "H": self.experts.p.hidden_dim}
        axes = {"E": self.expert_axes, "H": self.hidden_axes}
        found: list[Split] = []
        for path, array in weights.flatten_items():
            # A weight stored as int8 has two arrays below its name.
            spec = specs.get(path) or specs[path.rpartition(".")[0]]
            shape = known_sizes(array.shape)
            letters = zip(spec.layout[-len(shape) :], shape, strict=True)
            # The scales of int8 weights have size 1 along the letters that a product sums over.
            found.append(tuple(axes[x] if sizes.get(x) == size else () for x, size in letters))
        return found


@contextlib.contextmanager
def of_groups(groups: int) -> Iterator[Callable[[tf.Tensor], tf.Tensor]]:
    """Routes on every device, inside a `with` block, groups that do not divide over the devices.

    Tokens so few are the same on all devices. XLA would otherwise pad them, and communicate in
    every operation of the router.

    Yields:
      A function that places a tensor [G,...] as the block needs it.
    """
    current = current_partitioning()
    if current is None or current.mesh.size == 1 or _group_axes(groups):
        yield lambda x: x
        return
    mesh = current.mesh
    with use_partitioning(None):
        yield lambda x: xla.tile(x, ((),) * x.shape.rank, mesh)


def _group_axes(groups: int) -> Axes:
    """Returns the mesh axes that split groups, if evenly."""
    mesh = mesh_in_use()
    return even(groups, resolve("GSM", 3)[0], mesh) if mesh else ()


def _choices(routing: TokenChoiceRouting) -> tf.Tensor:
    """Returns float32 [2k,G,S]: the expert of each choice, E where there is none; then the gates.

    float32 holds the numbers of experts exactly, so that one collective moves both.
    """
    found = [
        (tf.where(a.kept_GS, a.expert_GS, routing.num_experts), a.gate_GS)
        for a in routing.assignments
    ]
    experts, gates = zip(*found, strict=True)
    return tf.concat([tf.cast(tf.stack(experts), tf.float32), tf.stack(gates)], 0)
