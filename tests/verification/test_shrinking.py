"""Tests that experiments become small and keep what divides evenly."""

import pytest

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.verification import shrinking
from lingvo_gshard.wings.verification.experiment import VerifyOptions


def shrunk(name, mesh, strategy, **options):
    partitioning = Partitioning.make(mesh, strategy)
    params = experiment(name, ["step.precision = 'bfloat16'"] if "paper" in name else [])
    return shrinking.shrink(params, partitioning, VerifyOptions(**options))


@pytest.mark.parametrize(
    "mesh,expected",
    [
        ("data=4,model=2", "data=4,model=2"),
        ("data=2048", "data=16"),
        ("data=64,model=8", "data=4,model=4"),
        ("data=17", "data=17"),
        ("stage=3,data=8", "stage=3,data=4"),
    ],
)
def test_a_large_mesh_keeps_its_axes(mesh, expected):
    assert str(shrinking.smaller_mesh(Mesh.parse(mesh), 16)) == expected


def test_a_giant_becomes_small_and_divides_as_before():
    found = shrunk("gshard_paper.moe_2048e_36l", "data=2048", "expert", max_devices=8)
    task = found.params.task
    assert str(found.mesh) == "data=8"
    assert task.model_dim <= 256 and task.encoder.num_layers <= 8
    assert task.encoder.moe.num_experts % 8 == 0 and task.encoder.moe.num_experts <= 16
    assert found.params.input.batch_rows % 8 == 0 and found.params.input.batch_rows <= 32
    assert task.model_dim % task.encoder.num_heads == 0
    assert found.params.step.precision == "float32"
    assert any("step.precision = 'float32' instead of 'bfloat16'" in n for n in found.notes)
    assert any("mesh data=8 instead of data=2048" in note for note in found.notes)


def test_what_does_not_divide_stays_indivisible():
    parts = [(8, 8), (1, 1)]
    assert shrinking._small_size(64_001, 256, parts, 1) % 8
    assert shrinking._small_size(64_000, 256, parts, 1) % 8 == 0
    assert shrinking._small_size(6_000, 100, [(12, 4)], 1) % 4 == 0


def test_small_experiments_stay_as_they_are():
    found = shrunk("translation.quickstart", "data=4,model=2", "expert_tensor")
    assert found.notes == () and found.params == experiment("translation.quickstart")


def test_the_settings_of_fp8_go_with_its_precision():
    params = experiment("language_model.quickstart", ["step.precision = 'fp8'"])
    params.step.fp8.set(delayed_scales=True, gradients="e4m3")
    partitioning = Partitioning.make("data=2", "data")
    found = shrinking.shrink(params, partitioning, VerifyOptions())
    assert found.params.step.fp8 == params.step.fp8.cls.params()
    assert any("step.fp8.delayed_scales = False instead of True" in n for n in found.notes)


def test_the_settings_of_nvfp4_go_with_its_precision():
    params = experiment("language_model.quickstart", ["step.precision = 'nvfp4'"])
    params.step.nvfp4.set(first_share=0.25)
    found = shrinking.shrink(params, Partitioning.make("data=2", "data"), VerifyOptions())
    assert found.params.step.nvfp4 == params.step.nvfp4.cls.params()


def test_dropout_is_switched_off_with_a_line_that_says_so():
    found = shrunk("translation.quickstart", "data=8", "data", dropout=False)
    assert not shrinking.without_dropout(found.params)[1]
    assert (
        "dropout off" in found.notes[0] and "task.encoder.residual_dropout_rate" in found.notes[0]
    )
