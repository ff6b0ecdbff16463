# tests: runtime/lowering/lowering.py, runtime/lowering/variables.py
"""Tests lowering: captured tensors, sharding of inputs, and the choice of the partitioner."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.sharding import annotate, paper_api
from lingvo_gshard.sharding.options import PARTITIONERS
from lingvo_gshard.sharding.partitioning import Partitioning

PLACED = Partitioning.make("data=4,model=2", "data_tensor")
X = np.arange(8, dtype=np.float32)


def lowered(function, *inputs: Array, partitioner: str = "gspmd"):
    """Returns the program of a function that returns one tensor."""
    return lower(
        "test", lambda *x: [("y", function(*x), None)], inputs, PLACED, partitioner=partitioner
    )


def executable(program) -> Executable:
    return Executable(program, devices_for(8))


def run(program, *values: np.ndarray) -> np.ndarray:
    compiled = executable(program)
    mesh = compiled.input_shardings[0].mesh
    inputs = zip(program.inputs, values, strict=True)
    return np.asarray(compiled(*(array.put(value, mesh) for array, value in inputs))[0])


def replicated(*shape: int, dtype: str = "float32") -> Array:
    return Array("x", shape, dtype, ((),) * len(shape))


@pytest.mark.parametrize(
    "value",
    [
        np.array([[1.5, -2.0]], np.float32),
        np.array([True, False, True]),
        np.array(2**40 + 1),
        np.array([1 + 2j], np.complex64),
        np.array([7], np.uint8),
        np.array(1 / 3),
        tf.constant([0.1, 3.0], tf.bfloat16).numpy(),
        tf.constant([0.1], tf.float16).numpy(),
    ],
    ids=lambda value: value.dtype.name,
)
def test_captured_tensors_become_constants(value):
    outside = tf.constant(value)
    program = lowered(lambda x: tf.where(x[0] > 0, outside, outside), replicated(8))
    assert len(program.inputs) == 1
    assert program.outputs[0].dtype == value.dtype.name
    found = run(program, X + 1)
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)


def test_multiple_captured_constants_are_bound_correctly():
    values = [tf.constant(10.0**n) for n in range(4)]

    def function(x, y):
        inner = tf.function(lambda z: z * values[2] - values[0])
        return x * values[1] + inner(y) / values[3]

    found = run(lowered(function, replicated(8), replicated(8)), X, 2 * X)
    np.testing.assert_allclose(found, X * 10 + (2 * X * 100 - 1) / 1000, rtol=1e-6)


def test_captured_variables_are_rejected_by_name():
    kernel = tf.Variable(X, name="kernel")
    with pytest.raises(ValueError, match="test uses variables: kernel:0. Make their values arg"):
        lowered(lambda x: x * kernel, replicated(8))
    with pytest.raises(ValueError, match="test uses variables: kernel:0"):
        lowered(lambda x: kernel.assign(x), replicated(8))
    many = [tf.Variable(1.0, name=f"v{n}") for n in range(9)]
    with pytest.raises(ValueError, match="v4:0 and 4 more"):
        lowered(lambda x: x * tf.add_n(many), replicated(8))


def test_captured_lookup_table_is_rejected():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant([1]), tf.constant([2])), -1
    )
    with pytest.raises(ValueError, match="from outside the function. Make it an argument"):
        lowered(lambda x: table.lookup(x), replicated(8, dtype="int32"))


def test_data_dependent_shape_is_rejected():
    with pytest.raises(ValueError, match=r"test: y has the shape \(None,\)"):
        lowered(lambda x: tf.boolean_mask(x, x > 0), replicated(8))


def test_inputs_take_the_sharding_of_their_annotation():
    def function(x, y, z, u, v):
        x = annotate(x, "BH")
        y = paper_api.split(y, 1, 8)
        z = annotate(z, "BM")
        v = annotate(annotate(v, "HM"), "BM")
        return tf.reduce_sum(x) + tf.reduce_sum(y) + tf.reduce_sum(z * u) + tf.reduce_sum(v)

    # 3 does not divide by 4, so z is replicated between steps.
    shapes = ((4, 2), (3, 8), (3, 2), (3, 2), (4, 4))
    inputs = [Array(f"x{i}", shape, "float32", None) for i, shape in enumerate(shapes)]
    program = lowered(function, *inputs)
    assert [a.split for a in program.inputs] == [
        (("data",), ("model",)),
        ((), ("data", "model")),
        ((), ()),
        ((), ()),
        (("model",), ()),
    ]
    values = [np.full(shape, i + 1.0, np.float32) for i, shape in enumerate(shapes)]
    assert run(program, *values) == 8 + 24 * 2 + 6 * 12 + 16 * 5


def test_explicit_split_overrides_the_annotation():
    array = Array("x", (8, 4), "float32", ((), ("model",)))
    program = lowered(lambda x: annotate(x, "BM"), array)
    assert program.inputs[0].split == ((), ("model",))


def test_lowering_does_not_depend_on_earlier_traces():
    def function(x):
        return tf.while_loop(lambda y: tf.reduce_sum(y) < 9, lambda y: annotate(y + x, "B"), [x])[0]

    first = lowered(function, replicated(8))
    tf.function(lambda x: x + 1).get_concrete_function(X)
    assert lowered(function, replicated(8)).digest == first.digest
    assert lowered(lambda x: function(x) + 1, replicated(8)).digest != first.digest


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_lowering_uses_the_chosen_partitioner(partitioner):
    program = lowered(lambda x: annotate(x * 3, "B"), replicated(8), partitioner=partitioner)
    compiled = executable(program)
    is_gspmd = "GSPMD sharding propagation" in compiled.compiler_output
    assert is_gspmd == (partitioner == "gspmd")
    assert "falling back" not in compiled.compiler_output
    (output,) = compiled.output_shardings
    assert tuple(output.spec) == ("data",)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_results_do_not_depend_on_partitioning(partitioner):
    """Splits a product, a sum and a cumulative sum in every way, unevenly too."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(6, 5)).astype("f4"), rng.normal(size=(5, 7)).astype("f4")
    for layout in itertools.product("BHM", repeat=2):
        layout = "".join(layout)

        def function(x, w, layout=layout):
            y = annotate(tf.matmul(annotate(x, layout), w), layout)
            return tf.cumsum(y, 0) + tf.reduce_sum(y, 1, keepdims=True)

        if len(set(layout)) < 2:
            continue
        found = run(
            lowered(function, replicated(6, 5), replicated(5, 7), partitioner=partitioner), x, w
        )
        expected = np.cumsum(x @ w, 0) + (x @ w).sum(1, keepdims=True)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=layout)
