# tests: wings/planning/planner.py, wings/planning/plan/plan.py, wings/planning/planned_program.py
"""Compares plans of layers with closed forms, with and without loops, and of a training step."""

import functools
import json
import math

import msgspec
import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.core import VariableSpec, context, initializers, scope_name
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.optimizers.orthogonalization import matrices_of, orthogonalize
from lingvo_gshard.wings.planning import picture, planner
from lingvo_gshard.wings.planning.machines import compilers, cuda, topologies
from lingvo_gshard.wings.planning.plan.plan import FlopCounts, ParameterCounts, Plan
from lingvo_gshard.wings.repeat.loop import Repeat
from tests.planning import example_plan
from tests.planning.compiled_layers import B, E, H, L, M, N, S, layer_of
from tests.runtime import tiny_translation

D, C, DEVICES, FLOAT = M // N, 2 * S // E, 8, 4
TIMES = 3
# Multiply-adds of all devices together in one forward pass of a layer.
PRODUCTS = {
    "feed_forward": 2 * B * L * M * H,
    "attention": 4 * B * L * M * N * D + 2 * B * L * L * N * D,
    "gather": 2 * B * L // S * E * C * M * H + B * L * M * E,
}
DISPATCH = 2 * B * L * E * C * M


class LoopBody(Layer):
    """Wraps a layer with the call signature of a loop body, (theta, x)."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("layer", None, "Params of the layer.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.create_child("layer", params.layer)

    @layer_method
    def fprop(self, theta, x_BLM: tf.Tensor) -> tf.Tensor:
        if "num_heads" in self.p.layer:
            return self.layer.fprop(theta.layer, x_BLM, self.layer.mask(None))
        return self.layer.fprop(theta.layer, x_BLM, tf.ones([B, L], tf.int32))


@functools.cache
def plan_of(
    kind: str, mesh: str, strategy: str, loop: bool, policy: str = "none", partitioner="gspmd"
) -> Plan:
    """Plans the gradients of one layer or of a loop of three."""
    params = LoopBody.params().set(layer=layer_of(kind).p)
    if loop:
        params = Repeat.params().set(body=(params,), times=TIMES, rematerialize=policy)
    layer = params.instantiate(path="stack")
    specs = layer.variable_specs()

    def step(theta, x_BLM, d_y):
        theta, x_BLM = annotate_weights(theta, specs), annotate(x_BLM, "BLM")
        with context.scope(training=False), tf.GradientTape() as tape:
            tape.watch((theta, x_BLM))
            y = annotate(layer.fprop(theta, x_BLM), "BLM")
        d_theta, d_x = tape.gradient(y, (theta, x_BLM), annotate(d_y, "BLM"))
        d_theta = annotate_weights(d_theta.transform(tf.convert_to_tensor), specs)
        return y, d_theta, annotate(d_x, "BLM")

    theta = specs.transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype))
    x = tf.TensorSpec((B, L, M))
    layouts = [
        specs.transform(lambda spec: f"weights:{spec.layout}"),
        "BLM",
        "BLM",
    ]
    return planner.plan(
        step,
        (theta, x, x),
        "cpu:8",
        mesh=mesh,
        strategy=strategy,
        layouts=layouts,
        partitioner=partitioner,
    )


def moved(plan: Plan) -> dict[tuple, int]:
    """Returns bytes times calls by kind and axis."""
    found: dict[tuple, int] = {}
    for row in plan.collectives:
        key = row.kind, row.axis
        found[key] = found.get(key, 0) + row.bytes * row.count
    return found


loops = pytest.mark.parametrize("loop", [False, True], ids=["one", "loop"])


@loops
@pytest.mark.parametrize(
    ("kind", "mesh", "strategy"),
    [
        ("feed_forward", "data=8", "data"),
        ("attention", "model=8", "tensor"),
        ("gather", "data=8", "expert"),
    ],
)
def test_plan_flops_match_closed_forms(kind, mesh, strategy, loop):
    plan = plan_of(kind, mesh, strategy, loop)
    expected = 3 * 2 * PRODUCTS[kind] * (TIMES if loop else 1) // DEVICES
    assert plan.flops == FlopCounts(
        useful=expected, executed=expected, rematerialized=0, dispatch=0, padding=0
    )
    assert sum(row.flops for row in plan.layers) == expected
    assert {row.phase for row in plan.layers if row.flops} == {"forward", "backward"}
    assert 0 < plan.mfu < 1


@pytest.mark.parametrize("kind", ["feed_forward", "attention"])
def test_recomputed_flops_are_listed_separately(kind):
    plan = plan_of(kind, "data=8", "data", True, "full")
    forward = 2 * PRODUCTS[kind] * TIMES // DEVICES
    last = 2 * B * L * M * (H if kind == "feed_forward" else N * D) * TIMES // DEVICES
    # No gradient needs the last matmul, so it is not recomputed.
    assert plan.flops.rematerialized in (forward, forward - last)
    assert plan.flops.useful == 3 * forward
    assert plan.flops.executed == 3 * forward + plan.flops.rematerialized
    assert "rematerialized" in {row.phase for row in plan.layers}


def test_one_hot_dispatch_flops_are_listed_separately():
    plan = plan_of("einsum", "data=8", "expert", False)
    # The gradient of either is one product for tokens; of combine, for gates too. One of them the
    # CPU's compiler may leave without a name.
    one = DISPATCH // DEVICES
    unknown = plan.flops.useful - 3 * 2 * PRODUCTS["gather"] // DEVICES
    assert unknown in (0, one)
    assert (plan.flops.dispatch + unknown) // one in (4, 5) and plan.flops.padding == 0
    assert plan.flops.executed == plan.flops.useful + plan.flops.dispatch


def test_products_of_an_optimizer_are_listed_separately():
    spec = VariableSpec("stack.w", "MH", (M, H), "float32", initializers.constant(0.0))
    matrices = matrices_of(spec)
    assert matrices is not None

    def step(w_MH):
        with tf.name_scope(f"optimizer/{scope_name(spec.path)}/"):
            return orthogonalize(w_MH, matrices, 3, 1e-7, "float32")

    plan = planner.plan(step, (tf.TensorSpec((M, H)),), "cpu:1")
    # X X^T, its square, and the polynomial of both times X.
    assert plan.flops.optimizer == 3 * 2 * (M * M * H + M**3 + M * M * H)
    assert plan.flops.executed == plan.flops.optimizer
    assert {row.phase for row in plan.layers} == {"optimizer"}


@loops
def test_plan_collectives_match_closed_forms(loop):
    times = TIMES if loop else 1
    plan = plan_of("gather", "data=8", "expert", loop)
    places = FLOAT * (B * L // S) * E * C * M // DEVICES
    assert moved(plan)["all-to-all", "data"] == 4 * times * places
    # A loop also counts the real tokens and the groups that have any, for means.
    counted = moved(plan)["all-reduce", "data"] - times * FLOAT * M * E
    assert counted in ((0, FLOAT, 2 * FLOAT) if loop else (0,))
    rows = [row for row in plan.collectives if row.kind == "all-to-all"]
    assert {(row.bytes, row.dtype) for row in rows} == {(places, "float32")}
    for phase in ("forward", "backward"):
        assert sum(row.count for row in rows if row.phase == phase) == 2 * times
    assert all("layer" in row.layer.split("/") for row in rows)
    assert math.isclose(sum(row.share for row in plan.collectives), 1)
    plan = plan_of("attention", "model=8", "tensor", loop)
    assert moved(plan) == {("all-reduce", "model"): 2 * times * FLOAT * B * L * M}


def test_partitioners_give_the_same_plan_if_all_tensors_are_annotated():
    gspmd = plan_of("feed_forward", "data=4,model=2", "data_tensor", False)
    shardy = plan_of("feed_forward", "data=4,model=2", "data_tensor", False, partitioner="shardy")
    assert shardy.partitioner == "shardy"
    assert gspmd.flops == shardy.flops
    assert moved(gspmd) == moved(shardy)
    for name in ("weights", "moments", "inputs"):
        assert getattr(gspmd.bytes_per_device, name) == getattr(shardy.bytes_per_device, name)


def test_function_weights_are_identified_by_layouts():
    plan = plan_of("gather", "data=8", "expert", False)
    experts, router = 2 * E * M * H + E * H + E * M, M * E
    held = FLOAT * (sum(row.bytes for row in plan.tensors) // FLOAT)
    assert plan.parameters == ParameterCounts(total=held // FLOAT, active=held // FLOAT)
    assert {row.kind for row in plan.tensors} == {"weights"}
    split = [row for row in plan.tensors if row.layout[0] == "E"]
    assert {row.split for row in split} == {"E over data (8)"}
    assert all(8 * row.bytes_per_device == row.bytes for row in split)
    assert sum(row.bytes for row in split) in (FLOAT * experts, FLOAT * 2 * E * M * H)
    assert FLOAT * router in {row.bytes for row in plan.tensors}
    on_device = sum(row.bytes_per_device for row in plan.tensors)
    assert plan.bytes_per_device.weights == on_device
    assert plan.bytes_per_device.inputs >= 2 * FLOAT * B * L * M // DEVICES


def test_plan_of_an_empty_program():
    plan = lingvo_gshard.plan(lambda x: x, [tf.TensorSpec((8, 4))], "cpu:8")
    assert plan.fits and plan.flops.executed == 0 and plan.collectives == []
    assert plan.tokens_per_step is None and plan.tokens_per_second is None
    assert msgspec.json.decode(plan.to_json(), type=Plan) == plan


def test_gpu_plan_is_labeled_as_an_estimate_without_the_compiler(monkeypatch):
    monkeypatch.setattr(cuda, "installed", lambda: None)
    plan = lingvo_gshard.plan(
        lambda x, w: tf.matmul(x, w),
        [tf.TensorSpec((16, 32)), tf.TensorSpec((32, 64))],
        "gpu:h100:1x8",
        strategy="data",
        layouts=["BM", "weights:MH"],
    )
    assert plan.compiler == "cpu" and plan.chip == topologies.get("gpu:h100:1x8").chip.name
    assert any("estimate" in note and "GPU" in note for note in plan.notes)
    assert plan.flops.executed == 2 * 16 * 32 * 64 // DEVICES


def test_without_libtpu_sums_over_slices_are_whole(monkeypatch):
    monkeypatch.setattr(compilers, "installed", lambda: None)
    plan = lingvo_gshard.plan(
        lambda x, w: tf.matmul(x, w),
        [tf.TensorSpec((16, 32)), tf.TensorSpec((32, 64))],
        "v5e:2x2*2",
        strategy="M->data",
        layouts=["BM", "weights:MH"],
    )
    (row,) = plan.collectives
    assert (row.kind, row.axis) == ("all-reduce across slices", "data")
    # The four chips of a slice share the bytes: 25 Gbit/s each.
    assert row.seconds_bound == pytest.approx(row.bytes / (4 * 25e9 / 8))


@pytest.mark.parametrize(
    ("topology", "settings", "words"),
    [
        ("cpu:8", {"mesh": "data=4"}, "`mesh=data=4` has 4 devices, but `topology=cpu:8` has 8"),
        ("v9:2x2", {}, "unknown kind of chip 'v9'"),
        ("cpu:8", {"strategy": "expret"}, "Did you mean 'expert'?"),
        ("cpu:8", {"partitioner": "shardi"}, "Did you mean 'shardy'?"),
        ("cpu:8", {"layouts": ["BM", "BM"]}, "has 1 arguments, but there are 2"),
    ],
)
def test_invalid_settings_are_rejected(topology, settings, words):
    with pytest.raises(ValueError, match=".") as raised:
        lingvo_gshard.plan(lambda x: x, [tf.TensorSpec((8, 4))], topology, **settings)
    assert words in str(raised.value)


@functools.cache
def step_plan(mesh: str, strategy: str, partitioner: str = "gspmd") -> Plan:
    trainer = tiny_translation.trainer()
    batch = {
        name: tf.TensorSpec(value.shape, value.dtype)
        for name, value in tiny_translation.batch(0).items()
    }
    partitioning = Partitioning.make(mesh, strategy)
    return planner.plan_step(
        trainer, batch, partitioning, topologies.get("cpu:8"), "tiny", partitioner, tokens=1e9
    )


def state_bytes(kind: str, parts: dict[str, int]) -> int:
    """Returns the bytes of one device's shard of weights or moments.

    parts: number of shards of each letter.
    """
    specs = getattr(tiny_translation.trainer().state_specs(), kind).flatten()
    total = 0
    for spec in specs:
        cut = math.prod(
            parts.get(letter, 1)
            for letter, size in zip(spec.layout, spec.shape, strict=True)
            if letter not in spec.unsplit and size % parts.get(letter, 1) == 0
        )
        total += FLOAT * math.prod(spec.shape) // cut
    return total


@pytest.mark.parametrize(
    ("mesh", "strategy", "parts"),
    [
        pytest.param("data=8", "expert", {"E": 8}, marks=pytest.mark.slow),
        pytest.param(
            "data=4,model=2",
            "expert_tensor",
            {"E": 4, "H": 2, "N": 2, "V": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_weights_and_moments_count_one_devices_shard(mesh, strategy, parts):
    plan = step_plan(mesh, strategy)
    for name, kind in (("weights", "theta"), ("moments", "moments")):
        assert getattr(plan.bytes_per_device, name) == state_bytes(kind, parts)
        rows = [row for row in plan.tensors if row.kind == name]
        assert sum(row.bytes_per_device for row in rows) == getattr(plan.bytes_per_device, name)
    rows, length = tiny_translation.ROWS, tiny_translation.LENGTH
    batch = 7 * 4 * rows * length // plan.devices * (2 if "model" in mesh else 1)
    # Includes the step counter, the stop flag and alignment.
    assert batch <= plan.bytes_per_device.inputs <= batch + 64 * 200


@pytest.mark.slow
def test_plan_of_a_training_step():
    plan = step_plan("data=8", "expert")
    record = json.loads(plan.to_json())
    assert set(record) == set(example_plan.example_plan())
    assert msgspec.json.decode(plan.to_json(), type=Plan) == plan
    assert "<html" in picture.to_html(plan)
    trainer = tiny_translation.trainer()
    rows, length = tiny_translation.ROWS, tiny_translation.LENGTH
    total = sum(math.prod(spec.shape) for spec in trainer.theta_specs.flatten())
    assert plan.parameters == ParameterCounts(total=total, active=active_parameters(trainer.task))
    useful = 3 * flops(trainer.task, TokenShape(rows, length, memory_length=length))
    assert plan.flops.useful == useful // 8
    assert plan.flops.dispatch == plan.flops.rematerialized == 0
    assert plan.flops.executed >= plan.flops.useful
    assert plan.tokens_per_step == rows * length
    assert plan.seconds_per_step >= plan.seconds_per_step_bound > 0
    assert math.isclose(plan.steps_per_second, 1 / plan.seconds_per_step)
    assert math.isclose(plan.tokens_per_second, rows * length * plan.steps_per_second)
    hours = 1e9 / plan.tokens_per_second / 3600 * 8
    assert math.isclose(plan.budget.chip_hours, hours)
    assert plan.notes[0].startswith("an estimate: ")
    assert plan.versions["lingvo_gshard"] == lingvo_gshard.__version__
    layers = {row.layer for row in plan.layers}
    assert {row.layer for row in plan.tensors} <= layers
    assert {"encoder/layers_1/feed_forward", "loss"} <= layers
    moe = [r for r in plan.collectives if r.kind == "all-to-all" and "layers_1" in r.layer]
    assert sum(row.count for row in moe) == 8


@pytest.mark.slow
def test_memory_classes_add_up_to_the_peak():
    sizes = msgspec.structs.asdict(step_plan("data=8", "expert").bytes_per_device)
    peak, _ = sizes.pop("peak"), sizes.pop("capacity")
    assert sum(sizes.values()) == peak


def test_unused_mesh_axis_is_noted():
    plan = plan_of("feed_forward", "data=4,model=2", "data", False)
    assert "strategy data shards nothing over axis model" in plan.notes
