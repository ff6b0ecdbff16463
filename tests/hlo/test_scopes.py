# tests: wings/hlo/names.py, core/scopes.py
"""Tests the layer, phase and dispatch of a training step's operations, with and without loops."""

import functools

import pytest
import tensorflow as tf

from lingvo_gshard.core.layer import scope_name
from lingvo_gshard.core.scopes import LOSS_SCOPE
from lingvo_gshard.layers.moe import EinsumDispatch
from lingvo_gshard.runtime.program.step_programs import train_program
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.hlo import Operation, read_module, read_operations
from lingvo_gshard.wings.planning.machines import topologies
from tests.layers.stacks.executions import loop, sequential

MESH = "data=2"
B, L, M, H, E, V = 4, 8, 8, 24, 2, 32
# Tokens of a group, and capacity slots of an expert per group.
S, C = 8, 8


def trainer_of(repeat: bool) -> Trainer:
    task = TranslationTask.params().set(
        source_vocabulary_size=V, target_vocabulary_size=V, model_dim=M
    )
    for stack in (task.encoder, task.decoder):
        stack.set(num_layers=2 if repeat else 1, num_heads=2, hidden_dim=H, moe_every=1)
        stack.execution = loop("full") if repeat else sequential()
        stack.moe.set(num_experts=E, group_size=S, dispatch=EinsumDispatch.params())
    params = Trainer.params().set(clip_norm=1.0)
    params.optimizer = Adafactor.params().set(min_factored_size=8)
    return params.instantiate(task.instantiate())


@functools.cache
def operations(repeat: bool) -> list[Operation]:
    trainer = trainer_of(repeat)
    names = [f"source_{part}" for part in ("ids", "segments", "positions")]
    names += [f"target_{part}" for part in ("inputs", "labels", "segments", "positions")]
    batch = {name: tf.TensorSpec((B, L), "int32") for name in names}
    program, _ = train_program(trainer, Partitioning.make(MESH, "expert"), "gspmd", batch)
    compiled = program.lower(topologies.get(f"cpu:{Mesh.parse(MESH).size}").compile_devices())
    scopes = [scope_name(path) for path in trainer.task.layer_paths()]
    found = read_operations(
        read_module(compiled.compile()), Mesh.parse(MESH), [*scopes, LOSS_SCOPE]
    )
    assert found.notes == []
    return found.operations


def products(found: list[Operation]) -> int:
    return sum(o.times * o.matmul_flops for o in found)


loops = pytest.mark.parametrize(
    "repeat",
    [
        pytest.param(False, id="one_by_one", marks=pytest.mark.slow),
        pytest.param(True, id="loop", marks=pytest.mark.slow),
    ],
)


@loops
def test_matmuls_have_a_layer_and_a_phase(repeat):
    found = [o for o in operations(repeat) if o.matmul_flops]
    assert not [o for o in found if not o.layer]
    phases = {"forward", "backward"} | ({"rematerialized"} if repeat else set())
    assert {o.phase for o in found} == phases


@loops
def test_dispatch_matmuls(repeat):
    """[G,S,E,C] times [G,S,M] and times [G,E,C,M], with three gradients, and two for the gates."""
    moving = [o for o in operations(repeat) if o.dispatch]
    layer, mixtures = ("layers/body_0", 4) if repeat else ("layers_0", 2)
    assert {o.layer for o in moving} == {
        f"{side}/{layer}/feed_forward" for side in ("encoder", "decoder")
    }
    gate = 2 * (B * L // S) * S * E * C // Mesh.parse(MESH).size
    one = gate * M
    assert products([o for o in moving if o.phase == "forward"]) == mixtures * 2 * one
    assert products([o for o in moving if o.phase == "backward"]) == mixtures * (3 * one + 2 * gate)
    again = products([o for o in moving if o.phase == "rematerialized"])
    assert again == (mixtures * one if repeat else 0)


@loops
def test_loss_is_listed_as_a_layer(repeat):
    found = [o for o in operations(repeat) if o.layer == LOSS_SCOPE]
    assert {o.phase for o in found} == {"forward", "backward"}
    assert not products(found)
    elementwise = B * L * V // Mesh.parse(MESH).size
    for phase in ("forward", "backward"):
        assert sum(o.other_flops for o in found if o.phase == phase) >= elementwise


@loops
def test_optimizer_is_a_phase_of_every_layer_with_weights(repeat):
    specs = trainer_of(repeat).task.variable_specs().flatten()
    owners = {scope_name(spec.path.rpartition(".")[0]) for spec in specs}
    found = [o for o in operations(repeat) if o.phase == "optimizer"]
    assert {o.layer for o in found} - {""} <= owners
    large = {
        scope_name(spec.path.rpartition(".")[0])
        for spec in specs
        if spec.layout.removeprefix("R") in ("EMH", "VM")
    }
    assert large <= {o.layer for o in found}
