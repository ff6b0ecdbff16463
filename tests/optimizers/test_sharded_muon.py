# tests: wings/optimizers/muon.py, wings/optimizers/orthogonalization.py
"""Holds Muon to the rules for all optimizers, and its matrices to where devices compute them."""

from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.scopes import OPTIMIZER_SCOPE
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.step_programs import train_program
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.runtime.step_compiler import batch_specs
from lingvo_gshard.sharding import annotate_like
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import Partitioned, partition
from lingvo_gshard.wings.optimizers.muon import Muon
from lingvo_gshard.wings.optimizers.orthogonalization import matrices_of, orthogonalize
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.machines import compilers, topologies
from lingvo_gshard.wings.repeat.loop import Repeat
from tests.runtime import tiny_translation

M, H, LAYERS = 64, 256, 16
MATRIX_BYTES = 4 * M * H


class MuonTest(testing.OptimizerTest):
    PARAMS = Muon.params().set(weight_decay=0.01)
    STRATEGIES: ClassVar[tuple[tuple[str, str], ...]] = (
        *testing.OptimizerTest.STRATEGIES,
        ("tensor", "model=4"),
    )


def make_spec(layout: str, experts: int = 8, layers: int = LAYERS) -> VariableSpec:
    sizes = {"R": layers, "E": experts, "M": M, "H": H, "N": 8, "D": 8}
    names = tuple(f"layers[{index}].w" for index in range(layers)) if "R" in layout else ()
    inputs = "M" if layout.index("M") < len(layout) - 1 else layout[:-1].strip("RE")
    shape = tuple(sizes[letter] for letter in layout)
    zeros = initializers.constant(0.0)
    return VariableSpec("w", layout, shape, "float32", zeros, inputs=inputs, slices=names)


def orthogonal(spec: VariableSpec):
    matrices = matrices_of(spec)
    assert matrices is not None

    def compute(x: tf.Tensor) -> tf.Tensor:
        x = annotate_like(x, spec, "moments")
        return annotate_like(orthogonalize(x, matrices, 5, 1e-7, "float32"), spec, "moments")

    return compute


# Of all matrices of a weight: the sum of squares, in one all-reduce for each axis of a split.
NORM = {"all-reduce": 1}
# An all-reduce in the loop over iterations.
GRAM = {"all-reduce": 2}
TO_AND_FRO = {"all-to-all": 2}


class ComputationTest(testing.TestCase, parameterized.TestCase):
    """Where the matrices of a weight are orthogonalized, by the collectives that it takes."""

    @parameterized.parameters(
        ("MH", "tensor", "model=8", GRAM),
        ("HM", "tensor", "model=8", GRAM),
        ("MH", "fsdp", "data=8", {**GRAM, **TO_AND_FRO}),
        ("MND", "fsdp_tensor", "data=4,model=2", {"all-reduce": 3, **TO_AND_FRO}),
        ("EMH", "expert_fsdp", "data=8", {}),
        ("REMH", "expert_fsdp", "data=8", {}),
        ("EHM", "expert_tensor", "data=4,model=2", GRAM),
        ("RMH", "zero1", "data=8", {**NORM, **TO_AND_FRO}),
        ("RHM", "fsdp_tensor", "data=4,model=2", {"all-reduce": 2, "all-to-all": 4}),
        ("RMH", "data", "data=8", {}),
    )
    def test_no_device_gathers_a_weight(self, layout, strategy, mesh, expected):
        spec = make_spec(layout)
        compiled = partition(orthogonal(spec), mesh=mesh, strategy=strategy)
        x = np.random.default_rng(0).normal(size=spec.shape).astype(np.float32)
        self.assertCollectives(compiled, x, expected=expected)
        for call in compiled.compile(x).collectives():
            self.assertLessEqual(call.bytes, MATRIX_BYTES)
        self.assertAllClose(compiled(x), orthogonal(spec)(tf.constant(x)), rtol=1e-3, atol=1e-4)

    def test_a_stack_is_computed_a_layer_at_a_time_on_each_device(self):
        """Twelve layers over eight devices: two rounds, the second with four layers of zeros."""
        spec = make_spec("RMH", layers=12)
        compiled = partition(orthogonal(spec), mesh="data=8", strategy="fsdp")
        x = np.random.default_rng(0).normal(size=spec.shape).astype(np.float32)
        moves = [c for c in compiled.compile(x).collectives() if c.kind == "all-to-all"]
        self.assertEqual([(c.times, c.bytes) for c in moves], [(2, MATRIX_BYTES)] * 2)
        self.assertAllClose(compiled(x), orthogonal(spec)(tf.constant(x)), rtol=1e-3, atol=1e-4)

    def test_few_layers_stay_split_along_their_larger_side(self):
        """With 3 layers, 5 of 8 devices would have nothing to do."""
        spec = make_spec("RMH", layers=3)
        compiled = partition(orthogonal(spec), mesh="data=8", strategy="fsdp")
        x = np.random.default_rng(0).normal(size=spec.shape).astype(np.float32)
        calls = compiled.compile(x).collectives()
        self.assertEqual(hlo.count_per_step(calls), {"all-to-all": 6, "all-reduce": 1 + 3 * 5})


@pytest.mark.slow
@pytest.mark.skipif(compilers.installed() is None, reason="libtpu is missing")
def test_tpus_move_and_multiply_matrices_in_bfloat16():
    spec, machine = make_spec("RMH"), topologies.get("v5e:2x4")
    optimizer = Muon.params().instantiate()

    def update(weight: tf.Tensor, gradient: tf.Tensor, moment: tf.Tensor) -> list[tf.Tensor]:
        theta, moments = optimizer.update(
            NestedMap(w=spec),
            NestedMap(w=weight),
            NestedMap(w=gradient),
            NestedMap(w=NestedMap(first_moment=annotate_like(moment, spec, "moments"))),
            tf.constant(3),
            tf.constant(0.1),
        )
        return [theta.w, moments.w.first_moment]

    partitioning, layouts = Partitioning.make("data=8", "fsdp"), [f"weights:{spec.layout}"] * 3
    partitioned = Partitioned(update, partitioning, machine.compile_devices(), layouts)
    program = partitioned.lower(*[tf.TensorSpec(spec.shape, tf.float32)] * 3)
    module = compilation.compile_for(program, machine).module
    operations = hlo.read_operations(module, Mesh.parse("data=8")).operations
    calls = [each.collective for each in operations if each.collective]
    moved = [(c.dtype, c.bytes) for c in calls if c.kind == "all-to-all"]
    assert moved == [("bfloat16", MATRIX_BYTES // 2)] * 2


def make_trainer() -> Trainer:
    """Returns a trainer of a translation model with experts, whose layers are a loop."""
    values = {"num_layers": 4, "execution": Repeat.params()}
    trainer = tiny_translation.trainer(stack_values=values)
    optimizer = Muon.params().set(weight_decay=0.01)
    return trainer.p.copy().set(optimizer=optimizer).instantiate(trainer.task.p.copy())


@pytest.mark.slow
def test_the_optimizer_of_a_step_gathers_nothing():
    partitioning = Partitioning.make("data=4,model=2", "expert_fsdp_tensor")
    specs = batch_specs(tiny_translation.batch(0))
    program, _ = train_program(make_trainer(), partitioning, "gspmd", specs)
    calls = Executable(program, devices_for(8)).collectives()
    found = {call.kind for call in calls if OPTIMIZER_SCOPE in call.op_name}
    assert found == {"all-to-all", "all-reduce"}


@pytest.mark.slow
def test_a_translation_model_learns_on_a_mesh_as_on_one_device():
    def losses(runtime):
        runtime.init_state()
        return [
            runtime.train_step(tiny_translation.batch(step % 2)).read()["loss"]
            for step in range(12)
        ]

    expected = losses(SingleDeviceRuntime(make_trainer()))
    partitioning = Partitioning.make("data=4,model=2", "expert_tensor_zero1")
    found = losses(SpmdRuntime(make_trainer(), partitioning, devices_for(8)))
    np.testing.assert_allclose(found, expected, rtol=0.01)
    assert np.mean(found[-2:]) < np.mean(found[:2]) - 0.2
