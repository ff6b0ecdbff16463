# tests: runtime/program/program.py, runtime/program/array.py
# tests: wings/saved_programs/program_file.py, wings/saved_programs/saving.py
# tests: runtime/program/executable.py
"""Checks that saved programs load unchanged, run with jax alone, and reject mismatches."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import threading
import zipfile

import hypothesis
import jax
import msgspec
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.program import program as programs
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import LayerNames, Program
from lingvo_gshard.sharding import annotate, einsum
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.options import PARTITIONERS
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.saved_programs import program_file

ROOT = pathlib.Path(__file__).resolve().parents[3]
MESH = "data=4,model=2"
BIG = 2**40


def feed_forward(x_BM, w_in, w_out, counts):
    """Two products split over both axes, and 64-bit values."""
    x_BM = annotate(x_BM, "BM")
    h_BH = tf.nn.relu(einsum("BM,MH->BH", x_BM, annotate(w_in, "MH", "weights")))
    return einsum("BH,HM->BM", h_BH, annotate(w_out, "HM", "weights")), counts + BIG


def arguments() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = ((8, 4), (4, 6), (6, 4))
    floats = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return *floats, np.arange(3, dtype=np.int64)


def make(partitioner: str = "gspmd", mesh: str | Mesh = MESH) -> Program:
    function = partition(feed_forward, mesh, "data_tensor", partitioner=partitioner, donate=(0,))
    return function.lower(*arguments())


@pytest.fixture(scope="module")
def program() -> Program:
    return make()


@pytest.fixture(scope="module")
def saved(program, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("program") / "feed_forward.program"
    program.save(path)
    return path


def check(results) -> None:
    x, w_in, w_out, counts = arguments()
    np.testing.assert_allclose(results[0], np.maximum(x @ w_in, 0) @ w_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(results[1], counts + BIG)
    assert results[1].dtype == np.int64


def test_program_describes_its_inputs_and_outputs(program):
    assert program.name == "feed_forward"
    assert [(a.path, a.shape, a.dtype, a.split) for a in program.inputs] == [
        ("argument[0]", (8, 4), "float32", (("data",), ())),
        ("argument[1]", (4, 6), "float32", ((), ("model",))),
        ("argument[2]", (6, 4), "float32", (("model",), ())),
        ("argument[3]", (3,), "int64", ((),)),
    ]
    assert [(a.path, a.shape, a.dtype, a.split) for a in program.outputs] == [
        ("result[0]", (8, 4), "float32", None),
        ("result[1]", (3,), "int64", None),
    ]
    assert program.donated == (0,) and program.mesh == Mesh.parse(MESH)
    assert "activations: B->data; G->data; H->model" in program.strategy
    assert {"jax", "tensorflow", "lingvo_gshard"} == dict(program.versions).keys()
    assert [programs.bytes_of(a, program.mesh) for a in program.inputs] == [32, 48, 48, 24]


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_program_round_trips_through_a_file_and_runs(partitioner, tmp_path):
    program = make(partitioner)
    program.save(tmp_path / "p")
    again = Program.load(tmp_path / "p", Mesh.parse(MESH))
    assert again == program and again.digest == program.digest
    executable = Executable(again, devices_for(8))
    inputs = [
        array.put(value, executable.input_shardings[0].mesh)
        for array, value in zip(again.inputs, arguments(), strict=True)
    ]
    check([np.asarray(x) for x in executable(*inputs)])
    assert inputs[0].is_deleted() and not inputs[1].is_deleted()
    # The sum over the two parts of H.
    assert [c.kind for c in executable.collectives()] == ["all-reduce"]


def test_layers_and_platforms_are_in_the_file(program, tmp_path):
    layers = LayerNames(("feed_forward", "norm"), (("feed_forward", None),))
    path = tmp_path / "with_layers.zip"
    dataclasses.replace(program, layers=layers).save(path)
    assert Program.load(path).layers == layers
    record, exported, _ = program_file.read(path)
    assert record.platforms == ("cpu", "cuda", "rocm", "tpu")
    assert record.digest == program.digest
    # Files of earlier versions have neither, and their stamp was computed without them.
    earlier = msgspec.structs.replace(record, layers=msgspec.UNSET, platforms=msgspec.UNSET)
    program_file.write(path, earlier, exported)
    with zipfile.ZipFile(path) as file:
        assert not {"layers", "platforms"} & set(json.loads(file.read("program.json")))
    assert Program.load(path).layers is None


def test_digest_covers_all_compiler_inputs(program):
    assert make().digest == program.digest
    others = [
        make("shardy"),
        make(mesh=Mesh.parse(MESH, "topology")),
        make(mesh="data=2,model=2"),
        dataclasses.replace(program, donated=()),
    ]
    assert len({program.digest, *(other.digest for other in others)}) == 5


UNDER_JAX_ALONE = """
import json, sys, zipfile
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

with zipfile.ZipFile(sys.argv[1]) as file:
    record = json.loads(file.read("program.json"))
    exported = jax.export.deserialize(bytearray(file.read("exported")))

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_use_shardy_partitioner", record["partitioner"] == "shardy")
axes = dict(axis.split("=") for axis in record["mesh"].split(","))
devices = np.reshape(jax.devices(), [int(size) for size in axes.values()])
mesh = jax.sharding.Mesh(devices, list(axes))

values = np.load(sys.argv[2])
inputs = []
for array in record["inputs"]:
    layout = NamedSharding(mesh, PartitionSpec(*(names or None for names in array["split"])))
    inputs.append(jax.device_put(values[array["path"]], layout))
results = jax.jit(exported.call)(*inputs)
np.savez(sys.argv[3], *map(np.asarray, results))
print(len(inputs[0].addressable_shards), results[0].sharding.num_devices)
loaded = {name.partition(".")[0] for name in sys.modules}
print(sorted(loaded & {"tensorflow", "lingvo_gshard", "keras"}))
"""


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_saved_program_runs_with_jax_alone(partitioner, tmp_path):
    make(partitioner).save(tmp_path / "p")
    paths = [a.path for a in make().inputs]
    np.savez(tmp_path / "in.npz", **dict(zip(paths, arguments(), strict=True)))
    run = subprocess.run(
        [sys.executable, "-c", UNDER_JAX_ALONE, "p", "in.npz", "out.npz"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "8 8\n[]\n"
    check(list(np.load(tmp_path / "out.npz").values()))


def rewritten(saved: pathlib.Path, tmp_path: pathlib.Path, stamp_again: bool, **changes):
    """Returns a copy of the file with changed values in its record."""
    with zipfile.ZipFile(saved) as file:
        record, exported = json.loads(file.read("program.json")), file.read("exported")
    record |= changes
    if stamp_again:
        typed = msgspec.convert(record, program_file.ProgramRecord)
        record["stamp"] = program_file.stamp(typed, exported)
    path = tmp_path / "changed"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("program.json", json.dumps(record))
        file.writestr("exported", exported)
    return path


def test_other_format_or_newer_jax_is_rejected(saved, tmp_path):
    with pytest.raises(
        ValueError, match="changed has format 3, but this version reads formats up to 2"
    ):
        Program.load(rewritten(saved, tmp_path, True, format=3))
    newer = {"jax": "99.0.1.dev2"}
    with pytest.raises(ValueError, match=r"written with jax 99\.0\.1\.dev2\. Install that"):
        Program.load(rewritten(saved, tmp_path, True, versions=newer))
    older = rewritten(saved, tmp_path, True, versions={"jax": "0.9.30", "tensorflow": "99"})
    assert Program.load(older).versions == (("jax", "0.9.30"), ("tensorflow", "99"))


def test_other_mesh_is_rejected(saved):
    assert Program.load(saved).mesh == Program.load(saved, Mesh.parse(MESH)).mesh
    with pytest.raises(ValueError, match=r"made for `mesh=data=4,model=2 .*`, not for data=8"):
        Program.load(saved, Mesh.parse("data=8"))
    with pytest.raises(ValueError, match=r"\(contiguous\)`, not for .* \(topology\)"):
        Program.load(saved, Mesh.parse(MESH, "topology"))


def test_device_order_is_kept(tmp_path):
    mesh = Mesh.parse(MESH, "topology")
    make(mesh=mesh).save(tmp_path / "p")
    assert Program.load(tmp_path / "p").mesh == mesh


def test_changed_content_is_rejected(saved, tmp_path):
    for changes in ({"partitioner": "shardy"}, {"donated": []}, {"mesh": "data=2,model=4"}):
        with pytest.raises(ValueError, match="was changed after it was written"):
            Program.load(rewritten(saved, tmp_path, False, **changes))


def test_files_that_are_not_programs_are_rejected(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="text is not a saved program"):
        Program.load(tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "zip", "w") as file:
        file.writestr("a", "b")
    with pytest.raises(ValueError, match="zip is not a saved program: .*program.json"):
        Program.load(tmp_path / "zip")
    with pytest.raises(FileNotFoundError):
        Program.load(tmp_path / "none")


def test_a_small_file_that_claims_to_be_large_is_rejected(saved, tmp_path):
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("program.json", "{}")
        file.writestr("exported", bytes(2**29))
    with pytest.raises(
        ValueError, match=r"not a saved program: [\d,]+ bytes claim to hold 536,870"
    ):
        Program.load(bomb)


@hypothesis.given(data=st.data())
def test_damaged_file_is_rejected(program, saved, tmp_path_factory, data):
    content = bytearray(saved.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damaged") / "p"
    path.write_bytes(content)
    try:
        found = Program.load(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        # zip itself ignores some bytes, such as timestamps.
        assert found == program


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def places(value, before=()):
    """Yields the keys that lead to each part of a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in pairs:
        yield (*before, key)
        if isinstance(part, (dict, list)):
            yield from places(part, (*before, key))


@hypothesis.settings(max_examples=300)
@hypothesis.given(data=st.data())
def test_changed_record_with_a_new_stamp_is_rejected_in_a_sentence(saved, tmp_path_factory, data):
    """Whoever changes a file can compute its stamp, too."""
    with zipfile.ZipFile(saved) as file:
        record, exported = json.loads(file.read("program.json")), file.read("exported")
    *way, last = data.draw(st.sampled_from(list(places(record))))
    parent = record
    for key in way:
        parent = parent[key]
    parent[last] = data.draw(JSON)
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(exported) - 1))
        exported = exported[:place] + bytes([exported[place] ^ 1]) + exported[place + 1 :]
    path = tmp_path_factory.mktemp("changed") / "p"
    try:
        decoded = msgspec.convert(record, program_file.ProgramRecord)
        record["stamp"] = program_file.stamp(decoded, exported)
    except ValueError:
        pass
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("program.json", json.dumps(record))
        file.writestr("exported", exported)
    try:
        Program.load(path)
    except ValueError as error:
        assert str(path) in str(error)


def test_argument_of_wrong_shape_or_dtype_is_rejected():
    mesh = jax.sharding.Mesh(np.array(devices_for(8)), ("data",))
    array = Array("theta.w", (8, 2), "float32", (("data",), ()))
    assert array.put(np.zeros((8, 2), np.float32), mesh).sharding.spec[0] == "data"
    for value in (np.zeros((8, 3), np.float32), np.zeros((8, 2)), np.int32(3)):
        with pytest.raises(ValueError, match=r"theta\.w is float32\[8, 2\], but the value for it"):
            array.put(value, mesh)


def test_64_bit_values_keep_their_dtype():
    mesh = jax.sharding.Mesh(np.array(devices_for(8)), ("data",))
    for value in (np.array([BIG]), np.array([1 + 2**-40])):
        put = Array("x", (1,), value.dtype.name, ((),)).put(value, mesh)
        assert put.dtype == value.dtype
        again = Array("x", (1,), value.dtype.name, ((),)).put(put, mesh)
        np.testing.assert_array_equal(np.asarray(again), value)


def test_unknown_partitioner_is_rejected(program):
    with pytest.raises(ValueError, match="`partitioner=shrdy` is unknown. Did you mean 'shardy'?"):
        dataclasses.replace(program, partitioner="shrdy")


def test_partitioners_of_threads_are_their_own():
    def partitioner() -> str:
        # Only modules for Shardy name meshes.
        mesh = jax.sharding.AbstractMesh((2,), ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        struct = jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding)
        exported = jax.export.export(jax.jit(lambda x: x + 1), platforms=["cpu"])(struct)
        return "shardy" if "sdy.mesh" in exported.mlir_module() else "gspmd"

    is_inside, may_leave = threading.Event(), threading.Event()

    def compile_beside():
        with programs.using_partitioner("gspmd"):
            found.append(partitioner())
            is_inside.set()
            may_leave.wait()

    found = []
    other = threading.Thread(target=compile_beside)
    other.start()
    is_inside.wait()
    # The two contexts end in the order of their beginnings, as those of threads may.
    with programs.using_partitioner("shardy"):
        assert partitioner() == "shardy"
        may_leave.set()
        other.join()
        assert partitioner() == "shardy"
    assert partitioner() == "shardy"
    assert found == ["gspmd"]


def test_wrong_number_of_devices_is_rejected(program):
    with pytest.raises(ValueError, match="`mesh=data=4,model=2` needs 8 devices"):
        program.lower(devices_for(8)[:4])


@pytest.mark.parametrize("donate", [(), (0,)])
def test_memory_matches_the_compilers_report(donate):
    def grow(x):
        return annotate(tf.sin(annotate(x, "BM")) + 1.0, "BM")

    executable = partition(grow, "data=8", "data", donate=donate).compile(np.zeros((16, 4), "f4"))
    memory, said = executable.memory(), executable._compiled.memory_analysis()
    arguments, outputs = (
        sum(programs.bytes_of(a, executable.program.mesh) for a in arrays)
        for arrays in (
            executable.program.inputs,
            [dataclasses.replace(a, split=(("data",), ())) for a in executable.program.outputs],
        )
    )
    assert arguments == outputs == 2 * 4 * 4
    assert memory["arguments"] == said.argument_size_in_bytes == arguments
    assert said.output_size_in_bytes == outputs
    assert memory["outputs"] == (0 if donate else outputs)
    assert memory["temporaries"] == said.temp_size_in_bytes
    assert memory["code"] == said.generated_code_size_in_bytes
    assert memory["peak"] == sum(size for name, size in memory.items() if name != "peak")
