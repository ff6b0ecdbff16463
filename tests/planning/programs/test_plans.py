# tests: wings/planning/programs/jax_program.py, wings/planning/programs/planned.py
"""Compares plans of a jax program with closed forms and with jax's own report on it."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import lingvo_gshard
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.programs.jax_program import to_program
from tests.planning.programs import jax_step
from tests.planning.programs.jax_step import FLOAT, PRODUCT, WEIGHTS


@functools.cache
def exported(platforms=("tpu",), is_shardy=True):
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", is_shardy)
    try:
        return jax.export.export(jax_step.jitted, platforms=platforms)(*jax_step.specs())
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "step.bin"
    path.write_bytes(exported().serialize())
    return path


@functools.cache
def compiled_by_jax():
    devices = np.array(jax.devices()[: jax_step.DEVICES])
    mesh = jax.sharding.Mesh(devices.reshape(4, 2), tuple(jax_step.MESH))
    return jax_step.jitted.lower(*jax_step.specs(mesh)).compile()


def memory_by_jax():
    found = compiled_by_jax().memory_analysis()
    return {
        "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
    }


def test_plan_of_a_file_matches_closed_forms(file):
    plan = lingvo_gshard.plan(file, "cpu:8", step_tokens=jax_step.ROWS, tokens=1e6)
    sizes, by_jax = plan.bytes_per_device, memory_by_jax()
    assert sizes.weights == sizes.moments == FLOAT * WEIGHTS // 2
    assert sizes.inputs == FLOAT * jax_step.ROWS * jax_step.MODEL // 4
    assert sizes.peak == sum(by_jax.values())
    assert (plan.mesh, plan.partitioner, plan.strategy_name) == (
        *("data=4,model=2", "shardy", "its own"),
    )
    assert plan.parameters.total == WEIGHTS
    # Forward and both gradients, less that of the first layer's input.
    products = 3 * 2 * jax_step.LAYERS - 1
    assert plan.flops.executed == plan.flops.useful == products * PRODUCT
    flops = {(row.layer, row.phase): row.flops for row in plan.layers if row.flops}
    assert flops == {
        (f"block_{index}/{scope}", phase): PRODUCT * count
        for index in range(jax_step.LAYERS)
        for scope in ("expand", "contract")
        for phase, count in (
            ("forward", 1),
            ("backward", 1 if (index, scope) == (0, "expand") else 2),
        )
    }
    moved = {axis: 0 for axis in jax_step.MESH}
    for row in plan.collectives:
        assert row.kind == "all-reduce"
        moved[row.axis] += row.bytes * row.count
    # Partial sums of each layer's output, and of the gradient of its input except for the first.
    over_model = (2 * jax_step.LAYERS - 1) * FLOAT * jax_step.ROWS // 4 * jax_step.MODEL
    assert moved["model"] == over_model
    assert 0 <= moved["data"] - FLOAT * WEIGHTS // 2 <= 2 * FLOAT
    assert plan.tokens_per_step == jax_step.ROWS and plan.budget.tokens == 1e6
    assert {row.layer for row in plan.tensors} == {"0", "1"}
    assert "arguments: 4 of weights (by name), 4 of moments (by name), 1 of inputs" in plan.notes[0]
    assert "exported for tpu, not for cpu" in plan.notes[1]


@pytest.mark.parametrize(
    ("platforms", "is_shardy", "mesh"),
    [
        (("tpu",), True, "data=4,model=2"),
        (("tpu",), False, "axis_0=4,axis_1=2"),
        (("tpu", "cpu"), True, "data=4,model=2"),
    ],
)
def test_programs_need_the_memory_that_jax_reports(platforms, is_shardy, mesh):
    topology = topologies.get("cpu:8")
    program = to_program(exported(platforms, is_shardy), "step", "cpu")
    assert str(program.mesh) == mesh
    assert program.partitioner == ("shardy" if is_shardy else "gspmd")
    assert program.donated == tuple(range(8))
    assert [array.path for array in program.inputs][:2] == ["state.mu[0].w_in", "state.mu[0].w_out"]
    found = compilation.compile_for(program, topology).memory
    assert found.pop("host") == 0
    found.pop("peak")
    assert found == memory_by_jax()


def test_a_saved_jax_program_is_a_program(tmp_path):
    program = to_program(exported(), "step", "cpu")
    program.save(tmp_path / "step.zip")
    assert type(program).load(tmp_path / "step.zip") == program


def test_plan_of_a_jax_function_equals_that_of_its_file(file):
    plans = [
        lingvo_gshard.plan(jax_step.step, jax_step.specs(), "cpu:8"),
        lingvo_gshard.plan(jax_step.jitted, jax_step.specs(), "cpu:8"),
        lingvo_gshard.plan(file, "cpu:8"),
    ]
    for plan in plans[:2]:
        assert plan.flops == plans[2].flops and plan.collectives == plans[2].collectives
    assert plans[1].bytes_per_device == plans[2].bytes_per_device
    # Without donation the new state has memory of its own.
    assert plans[0].bytes_per_device.activations > plans[1].bytes_per_device.activations


def test_numbered_devices_get_the_axes_of_a_given_mesh():
    mesh = Mesh.parse("data=4,model=2")
    program = to_program(exported(is_shardy=False), "step", "cpu", mesh)
    named = to_program(exported(), "step", "cpu")
    assert [array.split for array in program.inputs] == [array.split for array in named.inputs]


def symbolic():
    shape = jax.export.symbolic_shape("b, 4")
    return jax.export.export(jax.jit(lambda x: x + 1))(jax.ShapeDtypeStruct(shape, "float32"))


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, {}, "step.bin: cannot be read: No such file or directory"),
        (b"", {}, "step.bin is no program: neither a zip of gshard-inspect --program nor what"),
        (b"# a text" * 99, {}, "step.bin is no program"),
        (lambda: exported().serialize()[:900], {}, "step.bin is no program"),
        (lambda: symbolic().serialize(), {}, "step.bin: an argument has the symbolic shape (b, 4)"),
        ("step", {"topology": "cpu:4"}, "step.bin was made for 8 devices, data=4,model=2, "
         "but `topology=cpu:4` has 4"),
        ("step", {"mesh": "data=8"}, "step.bin: it was exported for the mesh data=4,model=2, not "
         "for `mesh=data=8`"),
        ("step", {"tokens": 1e9}, "`tokens=1e+09` needs the tokens of a step, which"),
        ("step", {"weights": "theta"}, "step.bin: `weights=theta` matches none of its arguments: "
         "state.mu[0].w_in"),
        ("step", {"strategy": "expert"}, "`strategy=expert` does not apply to a jax program"),
        ("cholesky", {"topology": "cpu:1"}, "step.bin: `topology=cpu:1`: its compiler rejects"),
        ("cholesky", {"topology": "cpu:1"}, "it was exported for cuda, not for cpu"),
        ("step", {"moments": "("}, "`moments=(` is no regular expression"),
        ("gspmd", {"mesh": "data=2,model=4"}, "are no splits over `mesh=data=2,model=4`"),
        ("gspmd", {"mesh": "data=4"}, "it was exported for 8 devices, not for `mesh=data=4`"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_named(tmp_path, content, options, words):
    path = tmp_path / "step.bin"
    if content == "cholesky":
        # Of platforms, CUDA alone has this library.
        factorize = jax.jit(jax.numpy.linalg.cholesky)
        spec = jax.ShapeDtypeStruct((4, 4), "float32")
        path.write_bytes(jax.export.export(factorize, platforms=["cuda"])(spec).serialize())
    elif content in ("step", "gspmd"):
        path.write_bytes(exported(is_shardy=content == "step").serialize())
    elif content is not None:
        path.write_bytes(content() if callable(content) else content)
    with pytest.raises(ValueError, match=".") as raised:
        lingvo_gshard.plan(path, **{"topology": "cpu:8", **options})
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_newer_jax_is_named():
    newer = jax.export.maximum_supported_calling_convention_version + 1
    program = dataclasses.replace(exported(), calling_convention_version=newer)
    with pytest.raises(ValueError, match=f"^step.bin: it has jax's calling convention {newer}"):
        to_program(program, "step.bin", "cpu")
    program = dataclasses.replace(exported(), mlir_module_serialized=b"ML\xefRx")
    with pytest.raises(ValueError, match=r"^step.bin: its StableHLO cannot be read by jax"):
        to_program(program, "step.bin", "cpu")


def test_arguments_of_every_kind():
    """Keys of random numbers, unused and named arguments, manual regions, explicit meshes."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())

    def function(key, unused, x, *, params):
        noise = jax.random.normal(key, x.shape, x.dtype, out_sharding=rows)
        summed = jax.shard_map(
            lambda part: jax.lax.psum(part, "data"),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )(x + noise)
        return summed @ params["w"], key

    plan = lingvo_gshard.plan(
        jax.jit(lambda key, unused, x, p: function(key, unused, x, params=p)),
        [
            jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=whole),
            jax.ShapeDtypeStruct((4,), "int32", sharding=whole),
            jax.ShapeDtypeStruct((8, 16), "bfloat16", sharding=rows),
            {"w": jax.ShapeDtypeStruct((16, 4), "bfloat16", sharding=whole)},
        ],
        "cpu:8",
        weights=r"^p\.w$",
    )
    assert plan.bytes_per_device.weights == 2 * 16 * 4
    assert plan.bytes_per_device.inputs == 2 * 4 + 2 * 8 * 16 // 4
    assert plan.flops.executed == 2 * 2 * 16 * 4
    assert {(row.kind, row.axis) for row in plan.collectives} >= {("all-reduce", "data")}
    assert (
        "arguments: 1 of weights (by `weights=^p\\.w$`), 0 of moments (by name), 2 of inputs"
        in plan.notes[0]
    )
