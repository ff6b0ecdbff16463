"""Compiles programs for other machines, including programs that the compiler rejects."""

import sys

import jax
import msgspec
import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.runtime.program.program import memory_bytes, using_partitioner
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.functions.partition import Partitioned
from lingvo_gshard.wings.planning import planner
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.machines import compilers, topologies
from tests.told import Told

GIB = 2**30
MEMORY = {"arguments": 3 * GIB, "outputs": GIB, "temporaries": 5, "code": 7, "peak": 4 * GIB + 12}


def program(topology: str, rows: int = 64):
    machine = topologies.get(topology)
    partitioning = Partitioning.make(f"data={machine.devices}", "data")
    partitioned = Partitioned(
        lambda x, w: tf.nn.softmax(x @ w),
        partitioning,
        machine.compile_devices(),
        ["BM", "weights:MH"],
    )
    return partitioned.lower(tf.TensorSpec((rows, 32)), tf.TensorSpec((32, 16)))


def test_memory_matches_xlas_report():
    topology = topologies.get("cpu:8")
    found = compilation.compile_for(program("cpu:8"), topology)
    with using_partitioner("gspmd"):
        compiled = program("cpu:8").lower(topology.compile_devices()).compile()
    assert found.memory == memory_bytes(compiled)
    assert found.note == "" and found.full_replications == [] and found.seconds > 0
    assert found.module.entry.parameters


def test_progress_is_reported():
    told = Told()
    planner.plan(lambda x: x + 1, [tf.TensorSpec((8,))], "cpu:8", progress=told)
    assert told.stages == [
        "tracing and lowering",
        "compiling for cpu:8",
        "reading the compiled program",
    ]


def test_mesh_of_wrong_size_names_both_flags():
    with pytest.raises(ValueError, match=r"`mesh=data=8` .* `topology=cpu:4` has 4.* data=4"):
        compilation.compile_for(program("cpu:8"), topologies.get("cpu:4"))


@pytest.mark.parametrize(
    ("message", "temporaries"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (28.00G) exceeds available HBM (15.48G).",
            24 * GIB,
        ),
        ("RESOURCE_EXHAUSTED: Used 5.50G of 15.48G hbm.", int(1.5 * GIB)),
        ("RESOURCE_EXHAUSTED: Used 1.5G of 1.2G hbm.", 0),
        ("RESOURCE_EXHAUSTED: no room in HBM", 5),
    ],
)
def test_temporaries_are_parsed_from_out_of_memory_errors(monkeypatch, message, temporaries):
    """The bytes that TPU compilers report include arguments and outputs."""
    calls = []

    def compile_(program, topology, progress, options):
        calls.append(topology.name)
        if len(calls) == 1:
            raise jax.errors.JaxRuntimeError(message)
        return compilation.OptimizedHlo(b"", dict(MEMORY), 1.0, [])

    monkeypatch.setattr(compilation, "_compile", compile_)
    found = compilation.compile_for(program("cpu:8"), topologies.get("v3:2x2"))
    assert calls == ["v3:2x2", "v5p:2x2x2"]
    assert found.memory["temporaries"] == temporaries
    assert found.memory["peak"] == 4 * GIB + temporaries + 7
    assert found.note.startswith("The step does not fit. ") and message in found.note


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("INTERNAL: Mosaic failed", "`topology=v3:2x2`: its compiler rejects "),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", "its compiler rejects "),
        ("RESOURCE_EXHAUSTED: Used 9T of 1G hbm.\nmore", "Not even TPU v5p has enough: RESOURCE"),
    ],
)
def test_program_that_no_chip_can_run_is_an_error(monkeypatch, message, words):
    def compile_(program, topology, progress, options):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(compilation, "_compile", compile_)
    with pytest.raises(ValueError, match=".") as raised:
        compilation.compile_for(program("cpu:8"), topologies.get("v3:2x2"))
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("topology", "larger"),
    [
        ("v3:1x1", "tpu7x:1x1x1"),
        ("v3:2x2", "v5p:2x2x2"),
        ("v3:16x16", "v5p:8x8x8"),
        ("v3:32x32", "v5p:8x16x16"),
        ("v4:2x2x1", "v5p:2x2x1"),
        ("v5e:2x6", "v5p:2x2x3"),
        ("v5p:2x2x1", None),
        ("v5e:1x1", "v5p:1x1x1"),
    ],
)
def test_larger_memory_topology_has_the_same_number_of_devices(topology, larger):
    topology = topologies.get(topology)
    found = compilation._larger_topology(topology)
    assert (found and found.name) == larger
    assert found is None or found.devices == topology.devices


def test_missing_or_mismatched_libtpu_is_reported(monkeypatch):
    monkeypatch.setattr(compilers, "installed", lambda: None)
    plan = lingvo_gshard.plan(lambda x: x + 1, [tf.TensorSpec((8,))], "v3:2x2")
    assert plan.compiler == "cpu"
    assert any(compilers.INSTALL in note for note in plan.notes)
    monkeypatch.setattr(compilers, "installed", lambda: "0.0.1")
    with pytest.raises(ValueError, match=r"libtpu 0\.0\.1 is installed, .* requires libtpu"):
        lingvo_gshard.plan(lambda x: x + 1, [tf.TensorSpec((8,))], "v3:2x2")


def test_compiler_output_is_hidden(capfd):
    compilation.compile_for(program("cpu:8"), topologies.get("cpu:8"))
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "after\n"


def feed_forward(x, w_in, w_out):
    """Runs a step of gradient descent."""
    with tf.GradientTape() as tape:
        tape.watch((w_in, w_out))
        loss = tf.reduce_sum(tf.nn.relu(x @ w_in) @ w_out)
    gradients = tape.gradient(loss, (w_in, w_out))
    return [w - 0.1 * d for w, d in zip((w_in, w_out), gradients, strict=True)]


def plan_of_feed_forward(topology: str, hidden: int):
    specs = [
        tf.TensorSpec((64, 4096)),
        tf.TensorSpec((4096, hidden)),
        tf.TensorSpec((hidden, 4096)),
    ]
    layouts = ["BM", "weights:MH", "weights:HM"]
    return lingvo_gshard.plan(
        feed_forward, specs, topology, layouts=layouts, donate=[1, 2], strategy="data"
    )


def test_plan_of_a_step_on_a_tpu():
    pytest.importorskip("libtpu")
    plan = plan_of_feed_forward("v3:2x2", 2**14)
    assert plan.fits and plan.compiler == "tpu" and plan.devices == 8
    assert plan.bytes_per_device.weights == 2 * 4 * 4096 * 2**14
    assert plan.bytes_per_device.capacity == int(15.48 * GIB)
    # The loss is not an output, so its matmul is not computed.
    assert plan.flops.executed == 4 * 2 * 8 * 4096 * 2**14
    code, capacity = sorted(plan.notes, reverse=True)
    assert code.startswith("the peak lacks the bytes of the program's code")
    assert capacity == f"capacity: {topologies.get('v3:2x2').chip.capacity_reason}"


def test_step_that_exceeds_tpu_memory():
    """It has 32 GiB of weights, and a core has 15.48 GiB of memory."""
    pytest.importorskip("libtpu")
    plan = plan_of_feed_forward("v3:1x1", 2**20)
    assert not plan.fits and plan.compiler == "tpu"
    assert plan.bytes_per_device.weights == 32 * GIB
    sizes = msgspec.structs.asdict(plan.bytes_per_device)
    peak, capacity = sizes.pop("peak"), sizes.pop("capacity")
    assert capacity < 32 * GIB <= peak == sum(sizes.values()) < 80 * GIB
    assert any("for TPU v3 reported: RESOURCE_EXHAUSTED" in note for note in plan.notes)


def test_step_too_large_for_any_tpu():
    pytest.importorskip("libtpu")
    with pytest.raises(ValueError, match=r"^`topology=v3:1x1`: .* Not even TPU7x has enough"):
        plan_of_feed_forward("v3:1x1", 2**24)


def test_a_long_wait_for_a_substitute_is_explained(monkeypatch):
    """The time without a word is set to nothing: the sentence comes while XLA compiles."""
    monkeypatch.setattr(compilers, "installed", lambda: None)
    monkeypatch.setattr(compilation, "_PATIENCE_SECONDS", 0.0)
    told = Told()
    compilation.compile_for(program("v3:2x2"), topologies.get("v3:2x2"), told)
    assert any("still compiling" in stage and compilers.INSTALL in stage for stage in told.stages)


def test_no_wait_is_explained_where_the_compiler_is_the_machines_own(monkeypatch):
    monkeypatch.setattr(compilation, "_PATIENCE_SECONDS", 0.0)
    told = Told()
    compilation.compile_for(program("cpu:8"), topologies.get("cpu:8"), told)
    assert told.stages == ["compiling for cpu:8"]
