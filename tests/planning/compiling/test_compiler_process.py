# tests: wings/planning/compiling/compiler_process.py
# tests: wings/planning/compiling/compiler_worker.py
# tests: wings/cluster/child_process.py
"""Compiles a small step: what a plan reads is the same before and after code."""

import dataclasses
import functools

import jax
import pytest
import tensorflow as tf

from lingvo_gshard.runtime.program.program import memory_bytes, using_partitioner
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import Partitioned
from lingvo_gshard.wings.planning.compiling import compilation, compiler_process
from lingvo_gshard.wings.planning.compiling.cache import CompilationCache, Settings, using_settings
from lingvo_gshard.wings.planning.compiling.compiler_process import CompilerProcess
from lingvo_gshard.wings.planning.machines import cuda, topologies
from tests.told import Told

pytest.importorskip("libtpu")
pytestmark = pytest.mark.slow

TOPOLOGY, GPUS = topologies.get("v3:2x2"), topologies.get("gpu:h100:1x8")


def step(x, w_in, w_out):
    with tf.GradientTape() as tape:
        tape.watch((w_in, w_out))
        loss = tf.reduce_sum(tf.nn.softmax(x @ w_in) @ w_out)
    return [
        w - 0.1 * d for w, d in zip((w_in, w_out), tape.gradient(loss, (w_in, w_out)), strict=True)
    ]


@functools.cache
def program(rows: int = 4096, topology=TOPOLOGY.name):
    partitioning = Partitioning.make("data=8", "data")
    layouts = ["BM", "weights:MH", "weights:HM"]
    devices = topologies.get(topology).compile_devices()
    partitioned = Partitioned(step, partitioning, devices, layouts)
    specs = [tf.TensorSpec((rows, 512)), tf.TensorSpec((512, 1024)), tf.TensorSpec((1024, 512))]
    return partitioned.lower(*specs)


def operations(proto: bytes) -> list:
    module = hlo.Module.from_bytes(proto)
    return hlo.read_operations(module, program().mesh, None).operations


def compiled(generates_code: bool, topology=TOPOLOGY):
    told = []
    with CompilerProcess(topology) as process:
        lowered = program(topology=topology.name)
        options = topology.compiler_options
        found = process.compile(lowered, generates_code, lambda: told.append("code"), options)
    return found, told


def test_program_is_that_of_a_whole_compilation():
    found, told = compiled(generates_code=False)
    assert not found.has_code and not told and found.memory["code"] == 0
    with using_partitioner("gspmd"):
        whole = program().lower(TOPOLOGY.compile_devices()).compile()
    assert operations(found.proto) == operations(hlo.read_proto(whole))
    report = memory_bytes(whole)
    for name in ("arguments", "outputs"):
        assert found.memory[name] == report[name]
    # The report counts gaps between temporaries twice, and leaves out constants.
    assert 0.5 * report["temporaries"] < found.memory["temporaries"] < 1.1 * report["temporaries"]


@pytest.mark.skipif(cuda.installed() is None, reason=cuda.MISSING)
@pytest.mark.parametrize("fills", [0.01, 10.0])
def test_program_of_a_gpu_is_that_of_a_whole_compilation(fills):
    with using_partitioner("gspmd"):
        lowered = program(topology=GPUS.name).lower(GPUS.compile_devices())
        whole = lowered.compile(dict(GPUS.compiler_options))
    memory = memory_bytes(whole)
    # XLA counts no code in a GPU's memory, so that even a full one does not wait for it.
    chip = dataclasses.replace(GPUS.chip, usable_bytes=int(memory["peak"] / fills))
    found, told = compiled(False, dataclasses.replace(GPUS, chip=chip))
    assert not found.has_code and not told and not found.note
    assert operations(found.proto) == operations(hlo.read_proto(whole))
    assert found.memory == pytest.approx(memory, abs=1000)
    assert compiled(True, GPUS)[0].memory == found.memory


def test_code_is_generated_where_it_decides():
    without, _ = compiled(generates_code=False)
    found, _ = compiled(generates_code=True)
    assert found.has_code and found.memory["code"] > 100_000
    assert found.memory["temporaries"] == without.memory["temporaries"]
    assert found.memory["peak"] == without.memory["peak"] + found.memory["code"]
    # On a chip that it nearly fills, the program is compiled to the end.
    full = int(without.memory["peak"] / 0.97)
    chip = dataclasses.replace(TOPOLOGY.chip, usable_bytes=full)
    found, _ = compiled(generates_code=False, topology=dataclasses.replace(TOPOLOGY, chip=chip))
    assert found.has_code


def test_a_plan_does_not_wait_long_for_code(monkeypatch):
    monkeypatch.setattr(compiler_process, "_MOST_CODE_SECONDS", 0.0)
    peak = compiled(generates_code=False)[0].memory["peak"]
    chip = dataclasses.replace(TOPOLOGY.chip, usable_bytes=int(peak / 0.97))
    found, told = compiled(False, dataclasses.replace(TOPOLOGY, chip=chip))
    assert told == ["code"] and not found.has_code and found.memory["peak"] == peak
    assert "had not generated the code after 0 s: the step takes 97.0% of the memory" in found.note


def test_refusal_states_the_sum_of_the_buffers():
    """The message is libtpu's own, so the sum is what it compares with a device's memory."""
    rows = 64 * 1024 * 1024
    with CompilerProcess(TOPOLOGY) as process, pytest.raises(jax.errors.JaxRuntimeError) as raised:
        process.compile(program(rows), generates_code=False, on_code=lambda: None)
    assert "RESOURCE_EXHAUSTED" in str(raised.value) and "HBM" in str(raised.value)


def test_process_that_dies_is_reported():
    with CompilerProcess(TOPOLOGY) as process:
        process._process.kill()
        process._process.wait()
        with pytest.raises(jax.errors.JaxRuntimeError, match="ended with exit code -9"):
            process.compile(program(), generates_code=False, on_code=lambda: None)


def test_second_compilation_is_read_from_the_cache(tmp_path):
    told = Told()
    cache = CompilationCache(tmp_path)
    with using_settings(Settings(cache)):
        first = compilation.compile_for(program(), TOPOLOGY, told)
        second = compilation.compile_for(program(), TOPOLOGY, told)
        with using_settings(Settings(cache, generates_code=True)):
            third = compilation.compile_for(program(), TOPOLOGY, told)
    assert first == second and not first.has_code and third.has_code
    compiling = "compiling for v3:2x2"
    found = "found the compiled program in the cache"
    assert told.stages == [compiling, found, compiling, "generating code"]
    assert (cache.read, cache.compiled) == (1, 2)
