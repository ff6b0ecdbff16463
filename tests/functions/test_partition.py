"""partition runs any TensorFlow function on the devices of a mesh by its annotations."""

import functools
import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.sharding import annotate, paper_api
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.options import PARTITIONERS
from lingvo_gshard.wings.functions.partition import partition

X = np.arange(16, dtype=np.float32).reshape(8, 2)


def double(x):
    return annotate(2 * annotate(x, "BM"), "BM")


def test_partition_is_exported_and_imported_lazily():
    assert lingvo_gshard.partition is partition
    with pytest.raises(AttributeError, match="No lingvo_gshard attribute partitoin"):
        _ = lingvo_gshard.partitoin
    code = (
        "import sys, lingvo_gshard; sys.exit('jax' in sys.modules or 'tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [("data=8", "data"), ("data=2,model=4", "tensor"), ("one=1", "replicated")],
)
def test_partitioned_function_computes_the_same(mesh, strategy, partitioner):
    rng = np.random.default_rng(0)
    shapes = ((8, 6), (6, 5), (5,))
    x, w, b = (rng.normal(size=shape).astype(np.float32) for shape in shapes)

    def loss(x, w, b):
        h_BH = annotate(tf.tanh(annotate(x, "BM") @ annotate(w, "MH") + b), "BH")
        return tf.reduce_sum(h_BH**2)

    def gradients(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch((w, b))
            value = loss(x, w, b)
        return value, tape.gradient(value, (w, b))

    partitioned = partition(gradients, mesh, strategy, partitioner=partitioner)
    found = tf.nest.flatten(partitioned(x, w, b))
    expected = tf.nest.flatten(gradients(*map(tf.constant, (x, w, b))))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_nested_arguments_and_results():
    def function(state, batch):
        new = state.transform(lambda w: w + batch["x"])
        return new, {"sum": tf.reduce_sum(batch["x"]), "none": None, "both": [new.a, (batch["x"],)]}

    run = partition(function, "data=8")
    state = NestedMap(a=X, b=NestedMap(c=2 * X))
    new, others = run(state, {"x": X})
    assert isinstance(new, NestedMap) and isinstance(new.b, NestedMap)
    np.testing.assert_array_equal(new.b.c, 3 * X)
    assert others["none"] is None and others["sum"] == X.sum()
    np.testing.assert_array_equal(others["both"][1][0], X)
    # What came out goes in again, and stays on the devices.
    assert isinstance(new.a, jax.Array)
    np.testing.assert_array_equal(run(new, {"x": X})[0].b.c, 4 * X)
    assert run.compile_count == 1


def test_new_argument_structure_compiles_again():
    run = partition(lambda d: 5 * d[0] if isinstance(d, list) else d["a"], "data=8")
    np.testing.assert_array_equal(run({"a": X}), X)
    np.testing.assert_array_equal(run([X]), 5 * X)
    assert run.compile_count == 2


def test_python_numbers_have_tensorflows_types():
    run = partition(lambda x, y, n: (x * y, n + 1), "data=8")
    product, n = run(X, 2.5, 3)
    assert product.dtype == np.float32 and n.dtype == np.int32 and n == 4
    np.testing.assert_array_equal(product, X * 2.5)


@pytest.mark.parametrize("kind", ["int64", "float64", "bfloat16", "uint8", "bool", "complex64"])
def test_dtypes_are_kept(kind):
    value = tf.cast(tf.constant([0, 1, 3]), kind).numpy()
    if kind == "int64":
        value += 2**40
    found = partition(lambda x: tf.concat([x, x], 0), "data=8")(value)
    assert found.dtype.name == kind
    np.testing.assert_array_equal(np.asarray(found), np.concatenate([value, value]))


def test_tensors_and_variables_are_accepted_as_arrays():
    run = partition(double, "data=8", "data")
    for value in (tf.constant(X), tf.Variable(X), X, run(X) / 2):
        np.testing.assert_array_equal(run(value), 2 * X)
    assert run.compile_count == 1


def test_uneven_split_of_an_argument():
    for rows in (1, 7, 9):
        x = np.ones((rows, 2), np.float32)
        result = partition(double, "data=8", "data")(x)
        np.testing.assert_array_equal(result, 2 * x)


def test_layouts_shard_arguments():
    layouts = ["BH", None, ((), ("data",))]
    run = partition(lambda x, y, z: x + y + z, "data=4,model=2", "data_tensor", layouts=layouts)
    # A split that does not divide is none: 2 columns over 4 devices.
    splits = [a.split for a in run.lower(X, X, X).inputs]
    assert splits == [(("data",), ("model",)), ((), ()), ((), ())]
    np.testing.assert_array_equal(run(X, X, X), 3 * X)


def test_layouts_may_be_nested_like_arguments():
    def function(theta, x):
        return x @ theta["b"]["w"] + tf.reduce_sum(theta["a"][0]) * theta["a"][1]

    layouts = [{"a": ["M", None], "b": {"w": "weights: MH"}}, "BM"]
    theta = {"b": {"w": np.ones((8, 2), "f4")}, "a": [np.ones(8, "f4"), np.ones(2, "f4")]}
    x = np.ones((8, 8), np.float32)
    run = partition(function, "data=8", "fsdp", layouts=layouts)
    # fsdp splits M of weights alone.
    splits = [a.split for a in run.lower(theta, x).inputs]
    assert splits == [((),), ((),), (("data",), ()), (("data",), ())]
    np.testing.assert_array_equal(run(theta, x), np.full((8, 2), 16.0))
    for wrong in ({"a": ["M"], "b": None}, {"a": None}, ["M", "M"], {"a": {"x": "M"}, "b": None}):
        with pytest.raises(ValueError, match=r"not have the structure of argument\[0\] of func"):
            partition(function, "data=8", "fsdp", layouts=[wrong, None]).lower(theta, x)


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        (["BM", "BM"], "layouts: double has 1 arguments, but there are 2 layouts"),
        (["BLM"], r"'BLM' has 3 dimensions, but argument\[0\] of double has shape \(8, 2\)"),
        (["BX"], "Layout 'BX': 'X' names no dimension"),
        (["weight: BM"], "Unknown kind of tensor 'weight'. Did you mean 'weights'?"),
    ],
)
def test_mismatched_layouts_are_rejected(layouts, words):
    with pytest.raises(ValueError, match=words):
        partition(double, "data=8", "data", layouts=layouts)(X)


def test_donated_argument_memory_is_reused():
    run = partition(double, "data=8", "data", donate=(0,))
    first = run(X)
    second = run(first)
    assert first.is_deleted()
    np.testing.assert_array_equal(second, 4 * X)
    with pytest.raises(ValueError, match=r"double: the memory of argument\[0\] was donated to"):
        run(first)
    # One that lies otherwise is copied, and so is what it shared memory with.
    elsewhere = jax.device_put(X, devices_for(8)[0])
    np.testing.assert_array_equal(run(elsewhere), 2 * X)
    whole = partition(tf.identity, "other=8")(X)
    np.testing.assert_array_equal(run(whole), 2 * X)
    for kept in (elsewhere, whole):
        np.testing.assert_array_equal(run(kept), 2 * kept)
    assert run.compile(X).memory()["outputs"] == 0


@pytest.mark.parametrize("mesh", ["data=8", "one=1", "other=8"])
def test_later_writes_to_an_argument_do_not_reach_the_call(mesh):
    x = np.ones((64, 64), np.float32)
    run = partition(lambda x: x + 0, mesh, "data" if "data" in mesh else "replicated")
    (first,) = run.compile(x).program.inputs
    put = first.put(x, run._mesh)
    x[:] = 5
    np.testing.assert_array_equal(put, np.ones((64, 64)))


def test_compile_returns_the_executable():
    run = partition(lambda x: tf.reduce_sum(annotate(x, "BM"), 0), "data=8", "data")
    run(X)
    executable = run.compile(X)
    assert run.compile_count == 1
    assert executable is run.compile(tf.TensorSpec((8, 2), tf.float32, "named"))
    (found,) = executable.collectives()
    assert (found.kind, found.bytes, found.op_name) == ("all-reduce", 8, "Sum")
    assert "all-reduce" in executable.hlo_text()
    assert executable.memory()["arguments"] == 8
    assert run.lower(X).inputs[0].split == (("data",), ())


def test_options_of_the_compiler_are_used_and_wrong_ones_refused():
    name = "xla_cpu_enable_fast_math"
    run = partition(double, "data=8", compile_options=[f"{name}=true"])
    assert run.compile(X).options == {name: "True"}
    np.testing.assert_array_equal(run(X), 2 * X)
    unknown = partition(double, "data=8", compile_options=["xla_cpu_no_such=1"])
    with pytest.raises(UserError, match="compile_options.*xla_cpu_no_such"):
        unknown(X)
    with pytest.raises(UserError, match="`compile_options=fast`: expected none, or name=value"):
        partition(double, "data=8", compile_options=["fast"])(X)


def test_overrides_and_the_papers_annotation_functions():
    run = partition(lambda x: paper_api.split(x, 1, 2) * 2, "data=2")
    assert run.lower(X).inputs[0].split == ((), ("data",))
    with pytest.raises(ValueError, match="overrides"):
        partition(double, "data=8", "data", overrides={"a": "nonsense"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("data=8", "expret"), "`strategy=expret`: unknown strategy 'expret'. Did you mean"),
        (("data=8", "tensor"), "needs axis 'model', which `mesh=data=8` lacks"),
        (("data=", "data"), "`mesh=data="),
        (("data=8", "data", "gspdm"), "`partitioner=gspdm` is unknown. Did you mean 'gspmd'?"),
        (("data=4", "data", "gspmd", 8), "`mesh=data=4` needs 4 devices .*, but there are 8"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, words):
    mesh, strategy, *rest = arguments
    options = dict(zip(("partitioner", "devices"), rest, strict=False))
    if "devices" in options:
        options["devices"] = devices_for(options["devices"])
    with pytest.raises(ValueError, match=words):
        partition(double, mesh, strategy, **options)(X)


def test_mesh_may_use_a_subset_of_devices_in_any_order():
    devices = devices_for(8)[6:3:-2]
    result = partition(double, Mesh.parse("data=2"), "data", devices=devices)(X)
    assert [shard.device for shard in result.addressable_shards] == devices
    np.testing.assert_array_equal(result, 2 * X)


def test_partial_function_takes_the_functions_name():
    run = partition(functools.partial(tf.reduce_sum, axis=0), "data=8")
    assert run.lower(X).name == "function"
    np.testing.assert_array_equal(run(X), X.sum(0))
