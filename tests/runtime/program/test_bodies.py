# tests: wings/saved_programs/platforms.py
# tests: runtime/program/program.py, runtime/lowering/lowering.py, wings/kernels/splicing.py
"""Checks that a saved program has a body for each platform with kernels, and a portable one."""

import dataclasses
import json
import subprocess
import sys
import zipfile

import jax
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.saved_programs import platforms, program_file
from lingvo_gshard.wings.saved_programs.platforms import with_bodies

B, N, L, D = 4, 2, 128, 64
PARTITIONING = Partitioning.make("data=4", "data")


def attention(*tensors):
    """Returns the output of causal attention over packed rows, and the gradient of the keys."""
    *sources, segments = tensors
    kernel = DenseKernel.params().instantiate()
    mask = kernel.prepare(AttentionMask(segments, is_causal=True))
    with tf.GradientTape() as tape:
        tape.watch(sources)
        query, keys, values = (annotate(x, "BNLD") for x in sources)
        mixed = tf.where(
            segments[:, None, :, None] > 0, kernel.attend(query, keys, values, mask), 0
        )
    d_keys = tape.gradient(mixed, sources[1], tf.sin(mixed))
    split = PARTITIONING.split("BNLD")
    return [("mixed", mixed, split), ("d_keys", d_keys, split)]


def make(partitioning: Partitioning) -> Program:
    split = partitioning.split("BNLD")
    inputs = [Array(name, (B, N, L, D), "float32", split) for name in ("query", "keys", "values")]
    inputs.append(Array("segments", (B, L), "int32", partitioning.split("BL")))
    return lower("attention", attention, inputs, partitioning)


def arguments() -> list[np.ndarray]:
    generator = np.random.default_rng(2)
    floats = [generator.normal(size=(B, N, L, D)).astype(np.float32) / 4 for _ in range(3)]
    return [*floats, np.sort(generator.integers(0, 3, (B, L)), 1)[:, ::-1].astype(np.int32)]


@pytest.fixture(scope="module")
def program() -> Program:
    return with_bodies(make(PARTITIONING), make, PARTITIONING)


@pytest.fixture(scope="module")
def interpreted() -> Program:
    """A program whose body for CPUs computes the TPU's kernels step by step."""
    body = make(PARTITIONING.on("tpu_interpreted"))
    return dataclasses.replace(make(PARTITIONING), bodies=(("cpu", body.module),))


def run(program: Program) -> list[np.ndarray]:
    executable = Executable(program, devices_for(4))
    mesh = executable.input_shardings[0].mesh
    pairs = zip(program.inputs, arguments(), strict=True)
    return [np.asarray(x) for x in executable(*(array.put(x, mesh) for array, x in pairs))]


def test_a_file_has_a_body_for_each_platform_with_kernels(program, tmp_path):
    program.save(tmp_path / "p")
    assert Program.load(tmp_path / "p") == program
    assert Program.load(tmp_path / "p").digest == program.digest
    record, _, bodies = program_file.read(tmp_path / "p")
    assert record.platforms == platforms.ALL and record.digest == program.digest
    assert (record.bodies, record.format) == (("cuda", "tpu"), 2) and list(bodies) == [
        "cuda",
        "tpu",
    ]
    for platform, call in (("tpu", "tpu_custom_call"), ("cuda", "__gpu$xla.gpu.triton")):
        exported = jax.export.deserialize(bytearray(bodies[platform]))
        assert exported.platforms == (platform,)
        assert platforms.calls_of_libraries(exported.mlir_module()) == [call]
        assert platforms.platforms_of(exported.mlir_module()) == (platform,)


def test_a_platform_without_a_body_runs_the_portable_one(program):
    assert platforms.platforms_of(program.exported("cpu").mlir_module()) == platforms.ALL
    for ours, theirs in zip(run(program), run(make(PARTITIONING)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_platform_runs_its_own_body(interpreted):
    portable = make(PARTITIONING)
    assert interpreted.digest != portable.digest
    lowered = interpreted.lower(devices_for(4)).as_text()
    assert "kernel_attention_" in lowered
    assert "kernel_attention_" not in portable.lower(devices_for(4)).as_text()
    for ours, theirs in zip(run(interpreted), run(portable), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-6)


def test_a_function_without_kernels_has_one_body():
    def doubled(partitioning: Partitioning) -> Program:
        array = Array("x", (4,), "float32", ((),))
        return lower("doubled", lambda x: [("y", 2 * x, ((),))], [array], partitioning)

    portable = doubled(PARTITIONING)
    assert with_bodies(portable, doubled, PARTITIONING) == portable


def test_a_changed_body_is_rejected(program, tmp_path):
    program.save(tmp_path / "p")
    with zipfile.ZipFile(tmp_path / "p") as file:
        content = {name: file.read(name) for name in file.namelist()}
    content["exported-tpu"] = content["exported-cuda"]
    with zipfile.ZipFile(tmp_path / "changed", "w") as file:
        for name, each in content.items():
            file.writestr(name, each)
    with pytest.raises(UserError, match="was changed after it was written"):
        Program.load(tmp_path / "changed")


UNDER_JAX_ALONE = """
import json, sys, zipfile
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_use_shardy_partitioner", False)
platform = jax.devices()[0].platform
with zipfile.ZipFile(sys.argv[1]) as file:
    record = json.loads(file.read("program.json"))
    name = f"exported-{platform}" if platform in record.get("bodies", ()) else "exported"
    exported = jax.export.deserialize(bytearray(file.read(name)))
mesh = jax.sharding.Mesh(jax.devices(), ["data"])
values = np.load(sys.argv[2])
inputs = []
for array in record["inputs"]:
    layout = NamedSharding(mesh, PartitionSpec(*(names or None for names in array["split"])))
    inputs.append(jax.device_put(values[array["path"]], layout))
np.savez(sys.argv[3], *map(np.asarray, jax.jit(exported.call)(*inputs)))
print(name, "lingvo_gshard" in sys.modules)
"""


def test_a_body_runs_with_jax_alone(interpreted, tmp_path):
    interpreted.save(tmp_path / "p")
    paths = [array.path for array in interpreted.inputs]
    np.savez(tmp_path / "in.npz", **dict(zip(paths, arguments(), strict=True)))
    command = [sys.executable, "-c", UNDER_JAX_ALONE, "p", "in.npz", "out.npz"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "exported-cpu False\n"
    found = np.load(tmp_path / "out.npz").values()
    for ours, theirs in zip(found, run(make(PARTITIONING)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-6)


def test_the_record_of_a_portable_program_is_as_before(tmp_path):
    make(PARTITIONING).save(tmp_path / "p")
    with zipfile.ZipFile(tmp_path / "p") as file:
        assert file.namelist() == ["program.json", "exported"]
        record = json.loads(file.read("program.json"))
    assert record["format"] == 1 and "bodies" not in record
