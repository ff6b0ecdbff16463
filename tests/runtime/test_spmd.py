# tests: runtime/spmd.py, runtime/program/padding.py, runtime/program/step_programs.py
# tests: training/run/runtime_protocol.py
"""Compares the spmd runtime on eight virtual devices with one device."""

import functools

import jax
import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdOptions, SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.sharding_tables import weight_rows
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings import hlo
from tests import tiny
from tests.runtime import tiny_translation, trainings

STEPS = 10
# Strategy, mesh, experts and vocabulary. Of the uneven ones nothing divides by the devices.
EVEN, UNEVEN = (8, 32), (6, 29)
FAST = [
    ("expert", "data=8", *EVEN, "gspmd"),
]
SLOW = [
    ("expert_fsdp_tensor", "data=2,fsdp=2,model=2", *EVEN, "gspmd"),
    ("replicated", "data=8", *EVEN, "gspmd"),
    ("data", "data=8", *EVEN, "gspmd"),
    ("fsdp", "data=8", *EVEN, "gspmd"),
    ("zero1", "data=8", *EVEN, "gspmd"),
    ("tensor", "model=8", *EVEN, "gspmd"),
    ("expert_tensor", "data=4,model=2", *EVEN, "gspmd"),
    ("folded_tensor", "data=4,model=2", *EVEN, "gspmd"),
    ("folded_sequence_tensor", "data=4,model=2", *EVEN, "gspmd"),
    ("zero1_tensor", "data=4,model=2", *EVEN, "gspmd"),
    ("expert", "data=8", *UNEVEN, "gspmd"),
    ("expert_fsdp_tensor", "data=2,fsdp=2,model=2", *UNEVEN, "gspmd"),
    ("folded_fsdp_tensor", "data=2,fsdp=2,model=2", *EVEN, "gspmd"),
    ("expert", "data=8", *EVEN, "shardy"),
    ("expert_fsdp_tensor", "data=2,fsdp=2,model=2", *EVEN, "shardy"),
    ("folded_tensor", "data=4,model=2", *EVEN, "shardy"),
]


def make(trainer: Trainer, strategy: str, mesh: str, *options, overrides=None) -> SpmdRuntime:
    partitioning = Partitioning.make(mesh, strategy, overrides)
    devices = devices_for(partitioning.mesh.size)
    return SpmdRuntime(trainer, partitioning, devices, SpmdOptions(*options))


@functools.cache
def trained_locally(experts: int, vocabulary: int) -> tuple[NestedMap, list, SingleDeviceRuntime]:
    """Returns the initial state, the metrics of each step, and the runtime."""
    runtime = trainings.on_one_device(tiny_translation.trainer(experts, vocabulary))
    state = runtime.state()
    batch_of = functools.partial(tiny_translation.batch, vocabulary_size=vocabulary)
    return state, trainings.train(runtime, STEPS, batch_of), runtime


@functools.cache
def trained(strategy: str, mesh: str, experts: int, vocabulary: int, partitioner: str):
    """Returns a runtime after the same steps from the same state, and their metrics."""
    runtime = make(tiny_translation.trainer(experts, vocabulary), strategy, mesh, partitioner)
    runtime.load_state(trained_locally(experts, vocabulary)[0])
    batch_of = functools.partial(tiny_translation.batch, vocabulary_size=vocabulary)
    return runtime, trainings.train(runtime, STEPS, batch_of)


def slow(cases: list) -> list:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("strategy", "mesh", "experts", "vocabulary", "partitioner"), [*FAST, *slow(SLOW)]
)
def test_trains_as_on_one_device(strategy, mesh, experts, vocabulary, partitioner):
    runtime, metrics = trained(strategy, mesh, experts, vocabulary, partitioner)
    _, expected, local = trained_locally(experts, vocabulary)
    assert expected[0]["loss"] - expected[-1]["loss"] > 0.15
    trainings.assert_same_metrics(metrics, expected, 1e-4)
    assert runtime.step == STEPS
    trainings.assert_same_arrays(runtime.state(), local.state(), 1e-3, 1e-5)
    assert runtime.executable().full_replications() == []
    batch = tiny_translation.batch(STEPS, vocabulary)
    found, wanted = runtime.eval_step(batch), local.eval_step(batch)
    assert found.keys() == wanted.keys()
    for name, pair in wanted.items():
        np.testing.assert_allclose(found[name], pair, rtol=1e-4, atol=1e-6, err_msg=name)


def check_lies_as_listed(
    runtime: SpmdRuntime, trainer: Trainer, partitioning: Partitioning
) -> None:
    """Checks that every device holds as many bytes of each tensor as the listing says."""
    for part, kind in (("theta", "weights"), ("moments", "moments")):
        rows = weight_rows(trainer.state_specs()[part], partitioning, kind)
        for row, array in zip(rows, runtime.state()[part].flatten(), strict=True):
            assert len(array.addressable_shards) == partitioning.mesh.size
            for shard in array.addressable_shards:
                assert shard.data.nbytes == row.bytes_per_device, row


def test_expert_weights_stay_on_their_devices():
    strategy, mesh, *sizes, _ = FAST[0]
    runtime, _ = trained(*FAST[0])
    partitioning = Partitioning.make(mesh, strategy)
    check_lies_as_listed(runtime, tiny_translation.trainer(*sizes), partitioning)
    w_in = runtime.state().theta.encoder.layers[1].feed_forward.experts.w_in
    assert [shard.data.shape for shard in w_in.addressable_shards] == [(1, 16, 32)] * 8
    assert [shard.index[0].start for shard in w_in.addressable_shards] == list(range(8))


def test_expert_parallel_step_communicates_only_tokens_and_gradients():
    """Each of two layers with experts has two all-to-alls in each pass."""
    runtime, _ = trained(*FAST[0])
    counts = hlo.count_by_kind(runtime.executable().collectives())
    assert counts["all-to-all"] == 8 and counts.keys() == {"all-to-all", "all-reduce"}
    moved = [c.op_name for c in runtime.executable().collectives() if c.kind == "all-to-all"]
    assert all("feed_forward" in operation for operation in moved), moved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [("fsdp", "data=8"), ("zero1", "data=8"), ("expert_tensor", "data=4,model=2")],
)
def test_weights_are_initialized_sharded(strategy, mesh):
    trainer = tiny_translation.trainer()
    runtime = make(trainer, strategy, mesh)
    runtime.init_state()
    expected, *_ = trained_locally(*EVEN)
    trainings.assert_same_arrays(runtime.state(), expected, 1e-5, 1e-6)
    check_lies_as_listed(runtime, trainer, Partitioning.make(mesh, strategy))
    assert runtime.executable("init").collectives() == []


# What the runtime is asked for by its callers, on a model of two matrices.


@pytest.fixture
def trainer() -> Trainer:
    params = tiny.experiment_params()
    return params.step.instantiate(params.task.instantiate(), params.run.steps)


@pytest.fixture
def runtime(trainer) -> SpmdRuntime:
    runtime = make(trainer, "data_tensor", "data=4,model=2")
    runtime.init_state()
    return runtime


@pytest.mark.slow
@pytest.mark.parametrize("partitioner", ["gspmd", pytest.param("shardy", marks=pytest.mark.slow)])
def test_uneven_batch(trainer, partitioner):
    local, sharded = SingleDeviceRuntime(trainer), make(trainer, "data_tensor", "data=4,model=2")
    sharded = make(trainer, "data_tensor", "data=4,model=2", partitioner)
    for each in (local, sharded):
        each.init_state()
    for rows in (7, 3):
        batch = tiny.make_batch(1, rows, rows)
        expected, found = local.train_step(batch).read(), sharded.train_step(batch).read()
        for name in expected.keys() - {"accuracy"}:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, err_msg=name)


def test_step_donates_the_state(runtime):
    before = runtime.state()
    runtime.train_step(tiny.make_batch(1, 0)).read()
    assert all(array.is_deleted() for array in before.flatten())
    # The metrics, and a pointer to each output.
    assert runtime.executable().memory()["outputs"] < 200


def test_compiles_once_per_shape(runtime):
    for rows in (16, 8, 16, 8):
        runtime.train_step(tiny.make_batch(1, rows, rows))
    assert all(each.seconds > 0 for each in runtime.compilations)
    assert [(c.function, c.inputs.get("x")) for c in runtime.compilations] == [
        ("init", None),
        ("train", ((16, tiny.INPUTS), "float32")),
        ("train", ((8, tiny.INPUTS), "float32")),
    ]
    for compilation in runtime.compilations:
        assert min(compilation.tracing, compilation.lowering, compilation.compiling) > 0


def test_state_can_be_moved_to_another_runtime(trainer, runtime):
    for index in range(2):
        runtime.train_step(tiny.make_batch(1, index))
    as_numpy = runtime.state().transform(np.asarray)
    kept = as_numpy.transform(np.copy)
    local, other = SingleDeviceRuntime(trainer), make(trainer, "fsdp", "data=2")
    local.load_state(as_numpy)
    other.load_state(runtime.state())
    for each in (local, other):
        assert each.step == 2
        for mine, theirs in zip(each.state().flatten(), as_numpy.flatten(), strict=True):
            assert np.asarray(mine).tobytes() == theirs.tobytes()
    found = [each.train_step(tiny.make_batch(1, 2)).read() for each in (local, other, runtime)]
    for name in found[0].keys() - {"accuracy"}:
        values = [each[name] for each in found]
        np.testing.assert_allclose(values, values[0], rtol=1e-4, err_msg=name)
    # NumPy's views of arrays whose memory the step took over.
    for mine, theirs in zip(as_numpy.flatten(), kept.flatten(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_runtime_with_the_same_sharding_reuses_the_state(trainer, runtime):
    other = make(trainer, "data_tensor", "data=4,model=2")
    other.load_state(runtime.state())
    assert other.train_step(tiny.make_batch(1, 0)).read()["loss"] > 0
    with pytest.raises(ValueError, match="train_step: the memory of .* was donated to an ear"):
        runtime.train_step(tiny.make_batch(1, 0))


def test_state_of_wrong_shape_is_rejected_by_path(trainer, runtime):
    state = runtime.state().transform(np.asarray)
    state.theta.hidden.w = state.theta.hidden.w[1:]
    with pytest.raises(ValueError, match=r"theta\.hidden\.w is float32\[6, 8\], but the value for"):
        runtime.load_state(state)


def test_evaluation_needs_only_weights(trainer, runtime):
    other = make(trainer, "fsdp", "data=2")
    other.load_theta(runtime.state().theta.transform(np.asarray))
    batch = tiny.make_batch(2, 0)
    expected = runtime.eval_step(batch)
    for name, pair in other.eval_step(batch).items():
        np.testing.assert_allclose(pair, expected[name], rtol=1e-5)


def test_messages_report_memory_of_compiled_programs(trainer):
    runtime = make(trainer, "tensor", "model=8")
    assert runtime.device_summary == "8 CPU devices as model=8"
    runtime.init_state()
    runtime.train_step(tiny.make_batch(1, 0)).read()
    notes = runtime.pop_messages()
    assert [note.split(":")[0] for note in notes] == ["init_state", "train_step"]
    assert all("MiB per device" in note for note in notes)
    assert runtime.pop_messages() == []
    with pytest.raises(ValueError, match="No eval program has been compiled yet"):
        runtime.executable("eval")


def test_too_much_replication_is_rejected(trainer):
    # The second matrix has 5 columns, its bias 5 numbers, and so have their moments.
    with pytest.raises(ValueError, match="`max_replicated_mb=0`: .*\n.*output.w.*H of 5 does not"):
        make(trainer, "tensor", "model=8", "gspmd", 0.0)
    assert make(trainer, "tensor", "model=8", "gspmd", 1.0).pop_messages() == []
    assert make(trainer, "data", "data=8", "gspmd", 0.0)


def test_wrong_number_of_devices_is_rejected(trainer):
    partitioning = Partitioning.make("data=4", "data")
    with pytest.raises(ValueError, match="`mesh=data=4` needs 4 devices .*but there are 8"):
        SpmdRuntime(trainer, partitioning, devices_for(8))


def test_mesh_larger_than_the_machine_is_rejected():
    assert len(devices_for(None)) == len(jax.devices())
    with pytest.raises(ValueError, match="`mesh` needs 1000 devices, but there are"):
        devices_for(1000)


def test_override_applies_to_its_layer(trainer):
    runtime = make(
        trainer, "tensor", "model=2", overrides={"task.hidden": "weights: H->none; M->model"}
    )
    runtime.init_state()
    theta = runtime.state().theta
    assert theta.hidden.w.addressable_shards[0].data.shape == (3, 8)
    assert theta.hidden.b.addressable_shards[0].data.shape == (8,)
    assert theta.output.b.addressable_shards[0].data.shape == (5,)
