# tests: wings/planning/planner.py, wings/hlo/tpu_slices.py
"""Checks plans of small steps on several TPU slices, compiled by libtpu."""

import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.sharding import einsum
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.plan.plan import Plan

pytest.importorskip("libtpu")
pytestmark = pytest.mark.slow

B, M, H = 4096, 1024, 1024
WEIGHTS = 4 * M * H


def step_plan(topology: str, mesh: str, strategy: str) -> Plan:
    """Returns the plan of a step that updates one weight."""

    def step(x_BM, w_MH):
        with tf.GradientTape() as tape:
            tape.watch(w_MH)
            with tf.name_scope("feed_forward"):
                h_BH = einsum("BM,MH->BH", x_BM, w_MH)
            loss = tf.reduce_sum(h_BH**2)
        return w_MH - 0.1 * tape.gradient(loss, w_MH)

    specs = [tf.TensorSpec((B, M)), tf.TensorSpec((M, H))]
    layouts = ["BM", "weights:MH"]
    return lingvo_gshard.plan(
        step, specs, topology, mesh=mesh, strategy=strategy, layouts=layouts, donate=[1]
    )


def collectives(plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns the calls of each kind of collective over each axis, and the bytes of one."""
    return {(row.kind, row.axis): (row.count, row.bytes) for row in plan.collectives}


def test_devices_are_listed_slice_by_slice():
    devices = topologies.get("v5e:2x2*2").compile_devices()
    assert [device.slice_index for device in devices] == [0] * 4 + [1] * 4
    assert [device.coords[:2] for device in devices] == 2 * [[0, 0], [1, 0], [0, 1], [1, 1]]


@pytest.mark.parametrize("mesh", ["data=8", "data=2,fsdp=4"])
def test_a_sum_over_slices_is_hierarchical(mesh):
    """Each device of a slice sums a quarter of the gradient with its counterpart."""
    plan = step_plan("v5e:2x2*2", mesh, "data")
    assert (plan.devices, plan.compiler) == (8, "tpu")
    across, within = ("data", "fsdp") if "fsdp" in mesh else ("data", "data")
    assert collectives(plan) == {
        ("reduce-scatter", within): (1, WEIGHTS),
        ("all-reduce across slices", across): (1, WEIGHTS // 4),
        ("all-gather", within): (1, WEIGHTS),
    }
    (row,) = [row for row in plan.collectives if row.kind == "all-reduce across slices"]
    assert row.seconds_bound == pytest.approx(WEIGHTS / 4 / (25e9 / 8))
    assert any("2 slices, joined by the data-center network" in note for note in plan.notes)


def test_tensor_parallelism_across_slices_is_noted():
    plan = step_plan("v5e:2x2*2", "model=2,data=4", "B->data; M->model")
    assert any(note.startswith("axis model crosses slices") for note in plan.notes)
