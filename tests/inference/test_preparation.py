"""Prepares weights in groups, and compares them with those of one program."""

import math

import jax
import numpy as np
import pytest

from lingvo_gshard.core.lazy import jnp
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.inference.decoding.models import model_facts
from lingvo_gshard.wings.inference.programs import preparation
from lingvo_gshard.wings.inference.programs.executables import PREPARE, Executables, ProgramKey
from lingvo_gshard.wings.inference.programs.maker import ProgramMaker
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS, EOS
from tests.layers.stacks.executions import loop

ATTENTION = "decoder__layer__self_attention__"


def executables_of(model, mesh="", precision="trained"):
    facts = model_facts(model.task, 32, BOS, (EOS,))
    partitioning = Partitioning.make(mesh, "tensor") if mesh else None
    maker = ProgramMaker(model.task, facts, partitioning, precision=precision)
    return Executables(maker.make, jax.devices()[: partitioning.mesh.size if mesh else 1])


def stacked_model():
    """Returns a model whose layers, without experts, are stacked, and share heads of keys."""
    values = {f"{ATTENTION}num_key_value_heads": 2, f"{ATTENTION}head_dim": 4}
    shape = {"decoder__num_heads": 4, "decoder__moe_every": 0, "decoder__execution": loop()}
    return tiny_engine.language_model(**shape, **values)


@pytest.mark.parametrize(
    ("mesh", "precision"),
    [
        ("", "trained"),
        pytest.param("model=4", "trained", marks=pytest.mark.slow),
        pytest.param("model=4", "int8", marks=pytest.mark.slow),
    ],
)
def test_groups_make_the_weights_that_one_program_makes(monkeypatch, mesh, precision):
    model = stacked_model()
    executables = executables_of(model, mesh, precision)
    arrays, whole = preparation.prepared_weights(executables, model.theta)
    monkeypatch.setattr(preparation, "_LARGE", 0)
    theta = model.theta.transform(lambda weight: jnp.asarray(np.asarray(weight)))
    again, found = preparation.prepared_weights(executables, theta)
    assert again == arrays
    for array, one, other in zip(arrays, found, whole, strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim), array.path
        np.testing.assert_array_equal(one, other)
    assert not any(weight.is_deleted() for weight in theta.flatten())
    preparation.prepared_weights(executables, theta, is_last=True)
    assert all(weight.is_deleted() for weight in theta.flatten())


def test_a_group_has_the_weights_that_are_joined_for_one_product(monkeypatch):
    program = executables_of(stacked_model()).program(ProgramKey(PREPARE))
    (whole,) = preparation.groups_of(program)
    assert (len(whole.inputs), len(whole.outputs)) == (len(program.inputs), len(program.outputs))
    monkeypatch.setattr(preparation, "_LARGE", 0)
    groups = preparation.groups_of(program)
    assert sorted(i for g in groups for i in g.inputs) == list(range(len(program.inputs)))
    assert sorted(i for g in groups for i in g.outputs) == list(range(len(program.outputs)))
    names = [
        ({program.inputs[i].path.rpartition(".")[2] for i in group.inputs}, len(group.outputs))
        for group in groups
    ]
    # Of both layers.
    assert ({"w_key", "w_value"}, 2) in names and ({"w_query"}, 2) in names
    sizes = [max(np.prod(program.inputs[i].shape) for i in group.inputs) for group in groups]
    assert sizes[0] == max(sizes)


@pytest.mark.parametrize("mesh", ["", "model=4"])
def test_the_peak_is_that_of_what_a_device_holds_in_turn(monkeypatch, mesh):
    executables = executables_of(stacked_model(), mesh)
    program = executables.program(ProgramKey(PREPARE))
    monkeypatch.setattr(preparation, "_LARGE", 0)

    def size(arrays, indices):
        shards = [math.prod(program.mesh.parts(axes) for axes in arrays[i].split) for i in indices]
        return sum(
            4 * math.prod(arrays[i].shape) // s for i, s in zip(indices, shards, strict=True)
        )

    groups = preparation.groups_of(program)
    peaks = []
    for at, group in enumerate(groups):
        made = sum(size(program.outputs, each.outputs) for each in groups[: at + 1])
        left = groups[at:] if mesh else [group]
        peaks.append(made + sum(size(program.inputs, each.inputs) for each in left))
    assert preparation.peak_bytes(program) == max(peaks)
    whole = size(program.inputs, range(len(program.inputs)))
    assert max(peaks) < 1.9 * whole
