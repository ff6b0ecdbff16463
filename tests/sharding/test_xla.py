"""Tests splits as OpShardings of tensors and gradients, and that XLA follows them."""

import importlib
import itertools
import sys
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import lazy
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.functions.partition import partition
from tests.sharding.compiled import PARTITIONERS

PRIVATE_MODULE = "tensorflow.python.compiler.xla.experimental.xla_sharding"

MESH = Mesh.parse("data=2,model=4")
CUBE = Mesh.parse("x=2,y=2,z=2")


def _annotations(function, *shapes: tuple[int, ...]) -> list[str]:
    """Returns the shardings in the function's StableHLO, in order."""
    specs = [tf.TensorSpec(shape) for shape in shapes]
    compiled = tf.function(function, jit_compile=True)
    text = compiled.experimental_get_compiler_ir(*specs)(stage="stablehlo", platform_name="CPU")
    calls = [line for line in text.splitlines() if "@Sharding" in line]
    return [line.partition('mhlo.sharding = "')[2].partition('"')[0] for line in calls]


def _text(split, mesh=MESH, shape=(8, 8)) -> str:
    (text,) = _annotations(lambda x: xla.tile(x, split, mesh), shape)
    return text


class PrivateModuleTest(testing.TestCase):
    def test_tensorflow_has_the_private_module(self):
        module = importlib.import_module(PRIVATE_MODULE)
        needed = {
            "Sharding": ("replicate", "tile", "partial_tile", "apply_to_tensor", "proto"),
            "auto_to_manual_spmd_partition": (),
            "manual_to_auto_spmd_partition": (),
        }
        missing = [
            ".".join((name, *attribute))
            for name, attributes in needed.items()
            for attribute in ((), *((a,) for a in attributes))
            if not hasattr(getattr(module, name, None), *attribute or ("__name__",))
        ]
        self.assertFalse(missing, f"sharding/xla.py needs {missing} of {PRIVATE_MODULE}")

    def test_a_missing_private_module_raises_import_error(self):
        self.enter_context(mock.patch.dict(sys.modules, {PRIVATE_MODULE: None}))
        # As if the module had not been used before.
        self.enter_context(mock.patch.dict(vars(lazy.xla_sharding), {"_module": None}))
        with self.assertRaisesRegex(
            ImportError, f"no longer has its private {PRIVATE_MODULE}.Sharding"
        ):
            xla.op_sharding((("data",),), MESH)


class AnnotationsTest(testing.TestCase):
    def test_one_axis_leaves_copies_along_the_other(self):
        for split, devices in (
            ((("data",), ()), "[2,1,4]0,1,2,3,4,5,6,7"),
            (((), ("data",)), "[1,2,4]0,1,2,3,4,5,6,7"),
            ((("model",), ()), "[4,1,2]0,4,1,5,2,6,3,7"),
        ):
            self.assertEqual(_text(split), f"{{devices={devices} last_tile_dim_replicate}}")

    def test_all_axes_leave_no_copies(self):
        self.assertEqual(_text((("data",), ("model",))), "{devices=[2,4]0,1,2,3,4,5,6,7}")
        self.assertEqual(_text((("model",), ("data",))), "{devices=[4,2]0,4,1,5,2,6,3,7}")

    def test_the_first_axis_of_a_dimension_is_the_major_one(self):
        self.assertEqual(_text((("data", "model"), ())), "{devices=[8,1]0,1,2,3,4,5,6,7}")
        self.assertEqual(_text((("model", "data"), ())), "{devices=[8,1]0,4,1,5,2,6,3,7}")

    def test_unsplit_tensors_and_axes_of_one_device_are_replicated(self):
        self.assertEqual(_text(((), ())), "{replicated}")
        self.assertEqual(_text((("one",), ()), Mesh.parse("one=1,data=4")), "{replicated}")
        self.assertEqual(_text((), shape=()), "{replicated}")

    def test_the_gradient_has_the_sharding_of_the_tensor(self):
        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.square(xla.tile(x, (("data",), ("model",)), MESH)))
            return tape.gradient(loss, x)

        self.assertEqual(_annotations(gradient, (8, 8)), ["{devices=[2,4]0,1,2,3,4,5,6,7}"] * 2)

    def test_the_gradient_of_gathered_rows_is_annotated(self):
        def gradient(table):
            with tf.GradientTape() as tape:
                tape.watch(table)
                rows = tf.gather(xla.tile(table, (("data",), ()), MESH), [1, 2, 1])
                loss = tf.reduce_sum(tf.square(rows))
            return tf.convert_to_tensor(tape.gradient(loss, table))

        self.assertLen(_annotations(gradient, (8, 8)), 2)

    def test_eager_annotation_is_the_identity(self):
        x = tf.ones([8, 8])
        self.assertIs(xla.tile(x, (("data",), ()), MESH), x)
        self.assertIs(xla.replicate(x), x)

    def test_rejects_invalid_arguments(self):
        x = tf.ones([8, 8])
        with self.assertRaisesRegex(ValueError, "has 1 dimensions for a tensor of rank 2"):
            xla.tile(x, (("data",),), MESH)
        with self.assertRaisesRegex(ValueError, "'data' more than once"):
            xla.tile(x, (("data",), ("data",)), MESH)
        with self.assertRaisesRegex(ValueError, "no axis 'modle'. Did you mean 'model'?"):
            xla.tile(x, (("modle",), ()), MESH)


def _all_splits(mesh: Mesh, rank: int):
    orders = [o for n in range(len(mesh.axes) + 1) for o in itertools.permutations(mesh.names, n)]
    for split in itertools.product(orders, repeat=rank):
        axes = [axis for axes in split for axis in axes]
        if len(axes) == len(set(axes)):
            yield split


class OpShardingTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(mesh=[MESH, CUBE, Mesh.parse("data=8")], rank=[1, 2, 3])
    def test_a_split_round_trips_through_its_op_sharding(self, mesh, rank):
        for split in _all_splits(mesh, rank):
            self.assertEqual(xla.split_of(xla.op_sharding(split, mesh), rank, mesh), split)

    @parameterized.parameters(
        (("x", None),),
        ((None, ("y", "x")),),
        ((("z", "x"), "y"),),
        ((None, None),),
    )
    def test_shardings_as_jax_writes_them_are_read(self, spec):
        """Reads devices written as an iota, as jax and XLA write them and annotations do not."""
        axes = tuple(() if x is None else x if isinstance(x, tuple) else (x,) for x in spec)
        devices = np.array(devices_for(8)).reshape(2, 2, 2)
        sharding = jax.sharding.NamedSharding(
            jax.sharding.Mesh(devices, ("x", "y", "z")), jax.sharding.PartitionSpec(*spec)
        )
        serialized = sharding._to_xla_hlo_sharding(2).to_proto().SerializeToString()
        self.assertEqual(xla.split_of(serialized, 2, CUBE), axes)
        parts = sharding.shard_shape((8, 8))
        self.assertEqual(xla.tiles_of(serialized, 2), tuple(8 // size for size in parts))

    def test_manual_shardings_have_no_tiles(self):
        manual = xla.xla_sharding.Sharding.manual().proto.SerializeToString()
        self.assertIsNone(xla.tiles_of(manual, 2))
        self.assertIsNone(xla.split_of(manual, 2, CUBE))

    def test_shardings_that_no_axes_produce_have_no_split(self):
        halves = xla.op_sharding((("x",), ()), Mesh.parse("x=2,y=4"))
        self.assertIsNone(xla.split_of(halves, 2, Mesh.parse("data=8")))
        self.assertIsNone(xla.split_of(halves, 2, Mesh.parse("data=4,model=2")))
        self.assertIsNone(xla.split_of(halves, 3, Mesh.parse("x=2,y=4")))
        self.assertIsNone(xla.split_of(halves, 2, Mesh.parse("x=2,y=2")))


class DevicesTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(
        partitioner=PARTITIONERS,
        split=[(("y", "x"), ("z",)), (("z",), ()), ((), ("x", "z")), ((), ())],
    )
    def test_devices_hold_their_slices_of_the_split(self, partitioner, split):
        """Compares each device's slice with the slice computed from its mesh coordinates."""
        x = np.arange(64, dtype=np.float32).reshape(8, 8)
        result = partition(
            lambda x: tf.sin(xla.tile(x, split, CUBE)), str(CUBE), partitioner=partitioner
        )(x)
        self.assertEqual(len(result.addressable_shards), 8)
        for held in result.addressable_shards:
            place = dict(zip(CUBE.names, np.unravel_index(held.device.id, CUBE.shape), strict=True))
            expected = x
            for dimension, axes in enumerate(split):
                for axis in axes:
                    expected = np.split(expected, CUBE.axis_size(axis), dimension)[place[axis]]
            self.assertAllClose(held.data, np.sin(expected), rtol=1e-5, atol=0)

    @hypothesis.given(rows=st.integers(1, 9), columns=st.integers(1, 9))
    @hypothesis.settings(max_examples=6, deadline=None)
    def test_sizes_may_be_indivisible(self, rows, columns):
        x = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
        split = (("data",), ("model",))

        def function(x):
            return tf.reduce_sum(tf.square(xla.tile(x, split, MESH)), axis=0)

        found = partition(function, str(MESH))(x)
        self.assertAllClose(found, np.sum(x * x, axis=0), rtol=1e-6, atol=0)


if __name__ == "__main__":
    testing.main()
