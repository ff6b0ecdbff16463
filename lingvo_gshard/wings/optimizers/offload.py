"""Offloads the moments of an optimizer to the memory of the host.

A step reads and writes each moment once. Between steps the moments of matrices and tables stay in
the host's memory. The update brings them to the device, and takes the new ones back (Ren et al.
2021, ZeRO-Offload, arXiv 2101.06840, section 3; here the device computes the update).

A device would need the memory of all moments if all came at once. The weights of a stack of layers
are therefore updated in a loop, one layer after the other. A layer's weights are in one iteration,
so that XLA moves the moments of some while it updates others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from lingvo_gshard.core import (
    OPTIMIZER_SCOPE,
    NestedMap,
    Params,
    UserError,
    VariableSpec,
    is_vector,
    scope_name,
    tf,
    to_device,
    to_host,
    write_slice,
)
from lingvo_gshard.sharding import annotate_like, current_partitioning
from lingvo_gshard.training import (
    STEP_PARTS,
    Clipping,
    Ingredients,
    Moments,
    Optimizer,
    StepPart,
    Update,
    WeightStep,
)

# The letter of stacked layers, whose weights are updated one after the other.
_LAYERS = "R"

# Returns a weight, in its own dtype, and its moments after a step.
UpdateWeight: TypeAlias = "Callable[[WeightStep], tuple[tf.Tensor, Moments]]"


def is_offloaded(moment: VariableSpec) -> bool:
    """Returns whether a moment is kept in host memory. Vectors are not, since they are small."""
    return not is_vector(moment.layout)


@STEP_PARTS.register("offloading")
class OffloadedMoments(StepPart):
    """Keeps the moments of a trainer's optimizer in host memory."""

    host_settings = ("step.offload_moments = True",)

    @classmethod
    def define(cls, p: Params) -> None:
        p.define(
            "offload_moments",
            False,
            "Whether the optimizer's moments stay in host memory between updates.",
            changes_results=False,
        )

    @classmethod
    def of(cls, made: Ingredients) -> OffloadedMoments | None:
        """Returns what keeps the moments, if the Params ask for it.

        Raises UserError if update-to-weight ratios are wanted, too.
        """
        p = made.params
        if not p.offload_moments:
            return None
        if p.update_ratios_every:
            raise UserError(
                f"step.update_ratios_every is {p.update_ratios_every}, but update-to-weight "
                "ratios need all moments on the device, which step.offload_moments keeps in host "
                "memory. Set step.update_ratios_every = 0 or step.offload_moments = False"
            )
        return cls(made.optimizer, made.theta_specs)

    def __init__(self, optimizer: Optimizer, specs: NestedMap):
        """Takes the optimizer, and the weights' tree of VariableSpec."""
        self._optimizer, self._specs = optimizer, specs

    def is_on_host(self, part: str, spec: VariableSpec) -> bool:
        """Returns whether an array of the state is an offloaded moment."""
        return part == "moments" and is_offloaded(spec)

    def update_weights(self, update: Update) -> tuple[NestedMap, NestedMap]:
        rest = (update.updates, update.learning_rate, update.is_skipped)
        return update_all(self._optimizer, self._specs, update.state, update.clipped, *rest)


@dataclasses.dataclass(frozen=True)
class _OffloadedStep:
    """One step of a weight whose moments may be in host memory.

    Attributes:
      step: the weight, its gradient and its moments in their own dtypes.
    """

    step: WeightStep
    moments: dict[str, VariableSpec]

    @property
    def offloaded(self) -> list[str]:
        """Names of the moments in host memory."""
        return [name for name, spec in self.moments.items() if is_offloaded(spec)]

    @property
    def is_stacked(self) -> bool:
        """Whether the weights of several layers are stacked, and each device has all layers."""
        spec = self.step.spec
        if not self.offloaded or spec.stacked != 1 or not spec.layout.startswith(_LAYERS):
            return False
        partitioning = current_partitioning()
        specs = [(spec, "weights"), *((each, "moments") for each in self.moments.values())]
        return partitioning is None or not any(partitioning.spec_split(*s)[0] for s in specs)


def update_all(
    optimizer: Optimizer,
    specs: NestedMap,
    state: NestedMap,
    clipped: Clipping,
    step: tf.Tensor,
    learning_rate: tf.Tensor,
    is_skipped: tf.Tensor | bool,
) -> tuple[NestedMap, NestedMap]:
    """Returns (theta, moments) after one step, with the values of `Optimizer.update`.

    Args:
      specs: the tree of VariableSpec of the weights.
      state: the state before the step, with theta and moments.
      clipped: the weights' gradients. They are scaled layer by layer, since a stack of scaled
        gradients would need memory of its own.
    """
    with tf.name_scope(f"{OPTIMIZER_SCOPE}/"):
        scale = clipped.scale()

    def update_weight(step: WeightStep) -> tuple[tf.Tensor, Moments]:
        with tf.name_scope(f"{OPTIMIZER_SCOPE}/{scope_name(step.spec.path)}/"):
            gradient = clipped.scaled(step.spec, step.gradient, scale)
        return optimizer.update_one(dataclasses.replace(step, gradient=gradient))

    shared = optimizer.shared_values(step)
    rows = optimizer.rows(specs, state.theta, clipped.gradients, state.moments)
    moment_specs = iter(optimizer.moment_specs(specs).flatten())
    steps = []
    for spec, weight, gradient, own in rows:
        gradient = _narrow(gradient)
        found = WeightStep(spec, weight, gradient, own, step, learning_rate, is_skipped, shared)
        steps.append(_OffloadedStep(found, {name: next(moment_specs) for name in sorted(own)}))
    theta, moments = zip(*_update(steps, update_weight), strict=True)
    return specs.pack(theta), specs.pack(map(NestedMap, moments))


def _narrow(gradient: tf.Tensor) -> tf.Tensor:
    """Returns a gradient in the type that it was computed in, if that is narrower.

    A stack in the wider type would be stored for the loop over layers.
    """
    source = gradient
    while source.op.type in ("Identity", "Cast") and source.op.inputs[0].dtype.size <= 4:
        source = source.op.inputs[0]
    return source if source.dtype.size < gradient.dtype.size else gradient


def _update(
    steps: Sequence[_OffloadedStep], update_weight: UpdateWeight
) -> list[tuple[tf.Tensor, Moments]]:
    """Returns the weights and the moments after a step, in the order of `steps`."""
    results: dict[int, tuple[tf.Tensor, Moments]] = {}
    loops: dict[int, list[int]] = {}
    for index, each in enumerate(steps):
        if each.is_stacked:
            loops.setdefault(each.step.spec.shape[0], []).append(index)
        else:
            results[index] = _update_whole(each, update_weight)
    for layers, indices in loops.items():
        updated = _update_layers([steps[i] for i in indices], layers, update_weight)
        results.update(zip(indices, updated, strict=True))
    return [results[index] for index in range(len(steps))]


def _update_whole(
    offloaded: _OffloadedStep, update_weight: UpdateWeight
) -> tuple[tf.Tensor, Moments]:
    """Updates a weight whose moments come to the device together."""
    step = offloaded.step
    moments = dict(step.moments)
    for name in offloaded.offloaded:
        moments[name] = annotate_like(to_device(moments[name]), offloaded.moments[name], "moments")
    weight, moments = update_weight(dataclasses.replace(step, moments=moments))
    return weight, _on_host(offloaded, moments)


def _update_layers(
    steps: Sequence[_OffloadedStep], layers: int, update_weight: UpdateWeight
) -> list[tuple[tf.Tensor, Moments]]:
    """Updates stacked weights in a loop over their layers."""

    def body(layer: tf.Tensor, held: Any) -> tuple:
        updated = [
            _update_layer(each, layer, own, update_weight)
            for each, own in zip(steps, held, strict=True)
        ]
        return layer + 1, updated

    start = [(each.step.weight, dict(each.step.moments)) for each in steps]
    _, held = tf.while_loop(
        lambda layer, _: layer < layers, body, (tf.constant(0), start), maximum_iterations=layers
    )
    return held


def _update_layer(
    offloaded: _OffloadedStep,
    layer: tf.Tensor,
    stacks: tuple[tf.Tensor, Moments],
    update_weight: UpdateWeight,
) -> tuple[tf.Tensor, Moments]:
    """Returns the stacks of weights, and of moments by name, with one layer updated."""
    step, spec = offloaded.step, offloaded.step.spec
    weights, moments = stacks
    own = {name: _read(stack, layer) for name, stack in moments.items()}
    for name in offloaded.offloaded:
        own[name] = to_device(own[name])
    weight, new = update_weight(
        dataclasses.replace(
            step,
            spec=dataclasses.replace(spec, layout=spec.layout[1:], shape=spec.shape[1:]),
            weight=_read(weights, layer),
            gradient=_read(step.gradient, layer),
            moments=own,
            first_element=layer * _as_int32(int(np.prod(spec.shape[1:], dtype=object))),
        )
    )
    new = _on_host(offloaded, new)
    return write_slice(weights, weight[tf.newaxis], layer), {
        name: write_slice(stack, new[name][tf.newaxis], layer) for name, stack in moments.items()
    }


def _on_host(offloaded: _OffloadedStep, moments: Moments) -> Moments:
    moved = {name: to_host(moments[name]) for name in offloaded.offloaded}
    return {**moments, **moved}


def _read(stack: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Returns a slice of a stack. XLA reads no more than the slice."""
    start = [index] + [0] * (stack.shape.rank - 1)
    return tf.squeeze(tf.slice(stack, start, [1, *stack.shape[1:]]), 0)


def _as_int32(number: int) -> int:
    """Returns the int32 with the lowest 32 bits of a number."""
    return (number + 2**31) % 2**32 - 2**31
