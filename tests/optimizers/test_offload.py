"""Compares updates with moments in host memory with the same updates on the device."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import initializers, random_numbers
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.sharding import annotate_weights
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.clipping import Clipping
from lingvo_gshard.training.step.optimizer import WeightStep
from lingvo_gshard.wings.optimizers import offload
from lingvo_gshard.wings.optimizers.muon import Muon
from tests import tiny

SIZES = {"R": 3, "M": 8, "H": 16, "V": 24}
LAYOUTS = {"table": "VM", "w_in": "RMH", "w_out": "RHM", "bias": "RH"}
STEP, RATE, CLIP_NORM = 4, 0.01, 1.0
OPTIMIZERS = {
    "adam": Adam.params().set(weight_decay=0.1),
    "adam_bfloat16": Adam.params().set(moment_dtype="bfloat16"),
    "adam_int8": Adam.params().set(moment_dtype="int8"),
    "adafactor": Adafactor.params().set(min_factored_size=8),
    "muon": Muon.params(),
}


def specs_of(dtype: str) -> NestedMap:
    def spec(name: str, layout: str) -> VariableSpec:
        shape = tuple(SIZES[letter] for letter in layout)
        slices = tuple(f"layers[{r}].{name}" for r in range(3)) if "R" in layout else ()
        zeros = initializers.constant(0.0)
        return VariableSpec(f"layers.body[0].{name}", layout, shape, dtype, zeros, slices=slices)

    return NestedMap({name: spec(name, layout) for name, layout in LAYOUTS.items()})


def state_of(optimizer, specs: NestedMap) -> NestedMap:
    """Returns random weights, gradients and moments, all positive."""
    rng = np.random.default_rng(1)

    def values(spec: VariableSpec) -> np.ndarray:
        drawn = rng.uniform(0.5, 2.0, spec.shape)
        if "int8" in spec.dtype:
            return (drawn * 40).astype(spec.dtype)
        return drawn.astype(tf.as_dtype(spec.dtype).as_numpy_dtype)

    moments = optimizer.moment_specs(specs).transform(values)
    return NestedMap(
        gradients=specs.transform(values), moments=moments, theta=specs.transform(values)
    )


def updated(
    name: str, dtype: str, mesh: str, is_offloaded: bool, is_skipped: bool = False
) -> tuple[list, Executable]:
    """Returns the weights and moments after a step, and the program."""
    optimizer, specs = OPTIMIZERS[name].instantiate(), specs_of(dtype)
    state = state_of(optimizer, specs)
    partitioning = Partitioning.make(mesh, "fsdp")
    arrays = []
    moment_specs = optimizer.moment_specs(specs)
    for part, tree in (("gradients", specs), ("moments", moment_specs), ("theta", specs)):
        kind = "moments" if part == "moments" else "weights"
        for spec in tree.flatten():
            split = partitioning.spec_storage_split(spec, kind)
            on_host = part == "moments" and is_offloaded and offload.is_offloaded(spec)
            arrays.append(Array(f"{part}.{spec.path}", spec.shape, spec.dtype, split, on_host))

    def step(*tensors: tf.Tensor) -> list:
        packed = state.pack(tensors)
        packed.theta = annotate_weights(packed.theta, specs)
        clipped = Clipping(packed.gradients, specs, tf.constant(2.0), CLIP_NORM)
        rest = (tf.constant(STEP), tf.constant(RATE), tf.constant(is_skipped))
        if is_offloaded:
            theta, moments = offload.update_all(optimizer, specs, packed, clipped, *rest)
        else:
            theta, moments = optimizer.update(specs, packed.theta, clipped(), packed.moments, *rest)
        results = [*moments.flatten(), *theta.flatten()]
        return [(a.path, x, a.split) for a, x in zip(arrays[len(LAYOUTS) :], results, strict=True)]

    program = lower("update", step, arrays, partitioning)
    outputs = tuple(
        dataclasses.replace(out, is_on_host=array.is_on_host)
        for out, array in zip(program.outputs, arrays[len(LAYOUTS) :], strict=True)
    )
    program = dataclasses.replace(program, outputs=outputs)
    executable = Executable(program, devices_for(partitioning.mesh.size))
    mesh = jax.sharding.Mesh(
        partitioning.mesh.arrange(devices_for(partitioning.mesh.size)), partitioning.mesh.names
    )
    results = executable(*(a.put(x, mesh) for a, x in zip(arrays, state.flatten(), strict=True)))
    return [*results], executable


@pytest.mark.parametrize(
    ("name", "dtype", "mesh"),
    [
        ("adam", "float32", "data=1"),
        ("adam", "bfloat16", "data=4"),
        pytest.param("adam_bfloat16", "float32", "data=4", marks=pytest.mark.slow),
        ("adam_int8", "float32", "data=4"),
        ("adafactor", "float32", "data=4"),
        pytest.param("muon", "float32", "data=4", marks=pytest.mark.slow),
    ],
)
def test_an_offloaded_update_has_the_values_of_one_on_the_device(name, dtype, mesh):
    expected, _ = updated(name, dtype, mesh, is_offloaded=False)
    found, _ = updated(name, dtype, mesh, is_offloaded=True)
    for here, there in zip(found, expected, strict=True):
        here, there = np.asarray(here, np.float64), np.asarray(there, np.float64)
        # XLA fuses a loop's products and sums in another way. A value that is rounded to 8 bits can
        # then fall on the other side of a boundary, which happens to few.
        close = np.isclose(here, there, rtol=3e-6, atol=1e-7)
        assert close.mean() > 0.99, (here.shape, close.mean())


def test_matrices_and_tables_are_in_host_memory_and_vectors_are_not():
    results, executable = updated("adam", "float32", "data=4", is_offloaded=True)
    kinds = {
        array.path: value.sharding.memory_kind
        for array, value in zip(executable.program.outputs, results, strict=True)
    }
    hosted = {path for path, kind in kinds.items() if kind == "pinned_host"}
    assert hosted == {
        f"moments.layers.body[0].{name}/{moment}_moment"
        for name in ("table", "w_in", "w_out")
        for moment in ("first", "second")
    }


def test_a_skipped_step_changes_nothing():
    results, executable = updated("adam", "float32", "data=4", is_offloaded=True, is_skipped=True)
    optimizer, specs = OPTIMIZERS["adam"].instantiate(), specs_of("float32")
    state = state_of(optimizer, specs)
    before = [*state.moments.flatten(), *state.theta.flatten()]
    for value, old in zip(results, before, strict=True):
        np.testing.assert_array_equal(np.asarray(value), old)


def test_random_numbers_of_a_layer_are_those_of_its_place_in_the_stack():
    spec = specs_of("float32").w_in
    layers, rest = spec.shape[0], spec.shape[1:]
    key_of_stack = WeightStep(spec, *[tf.constant(0.0)] * 2, {}, tf.constant(STEP), 0.1)
    whole = random_numbers.hashed_words(spec.shape, key_of_stack.rounding_key("w"))
    for layer in range(layers):
        first = tf.constant(layer * math.prod(rest))
        step = dataclasses.replace(key_of_stack, first_element=first)
        found = random_numbers.hashed_words(rest, step.rounding_key("w"))
        np.testing.assert_array_equal(found, whole[layer])


def test_update_ratios_need_moments_on_the_device():
    params = tiny.experiment_params().step.set(offload_moments=True, update_ratios_every=10)
    with pytest.raises(UserError, match=r"step\.update_ratios_every is 10.*step\.offload_moments"):
        params.instantiate(tiny.TinyTask.params())
