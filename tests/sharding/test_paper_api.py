"""Tests the paper's annotations: shardings, the slices on each device, and errors."""

import contextlib

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.sharding.paper_api import mesh_split, replicate, shard, split
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.wings.functions.partition import partition
from tests.sharding.compiled import PARTITIONERS

DEVICES = "a=2,b=2,c=2"


def _on(mesh: str):
    return use_partitioning(Partitioning.make(mesh, "replicated"))


def _numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


class PlacementTest(testing.TestCase, parameterized.TestCase):
    def shards_of(
        self, annotate, x: np.ndarray, partitioner: str = "gspmd"
    ) -> dict[int, np.ndarray]:
        """Returns each device's slice of an annotated `x`, read from a computation's result."""
        result = partition(lambda x: tf.square(annotate(x)), DEVICES, partitioner=partitioner)(x)
        self.assertAllEqual(result, np.square(x))
        return {
            held.device.id: np.sqrt(np.asarray(held.data)) for held in result.addressable_shards
        }

    @parameterized.parameters(*PARTITIONERS)
    def test_partition_i_is_on_device_i(self, partitioner):
        x = _numbers(16, 3)
        held = self.shards_of(lambda x: split(x, 0, 8), x, partitioner)
        for device, part in enumerate(np.split(x, 8)):
            self.assertAllEqual(held[device], part)

    @parameterized.parameters(*PARTITIONERS)
    def test_fewer_partitions_than_devices_are_replicated(self, partitioner):
        x = _numbers(3, 8)
        held = self.shards_of(lambda x: split(x, -1, 4), x, partitioner)
        parts = np.split(x, 4, axis=1)
        for device in range(8):
            self.assertAllEqual(held[device], parts[device % 4])

    def test_shard_follows_the_device_assignment(self):
        x = _numbers(3, 16, 8)
        assignment = np.array([[[3, 1, 0, 2], [7, 4, 5, 6]]])
        held = self.shards_of(lambda x: shard(x, assignment), x)
        for row in range(2):
            for column in range(4):
                part = x[:, 8 * row : 8 * row + 8, 2 * column : 2 * column + 2]
                self.assertAllEqual(held[assignment[0, row, column]], part)

    def test_shard_reproduces_the_example_of_the_paper(self):
        held = self.shards_of(
            lambda x: shard(x, np.arange(8).reshape(1, 2, 4)), _numbers(3, 16, 64)
        )
        self.assertEqual({part.shape for part in held.values()}, {(3, 8, 16)})

    def test_shard_on_a_subset_of_devices_replicates_over_the_others(self):
        x = _numbers(4, 2)
        held = self.shards_of(lambda x: shard(x, [[6], [1]]), x)
        self.assertAllEqual(held[6], x[:2])
        self.assertAllEqual(held[1], x[2:])
        self.assertEqual(sum(np.array_equal(part, x[:2]) for part in held.values()), 4)

    def test_replicate_copies_the_tensor_to_every_device(self):
        x = _numbers(8, 2)
        held = self.shards_of(lambda x: replicate(split(x, 0, 8)), x)
        self.assertEqual(len(held), 8)
        for full_copy in held.values():
            self.assertAllEqual(full_copy, x)

    def test_mesh_split_follows_its_dims_mapping(self):
        x = _numbers(4, 3, 8)
        devices = np.array([[0, 2, 4, 6], [1, 3, 5, 7]])
        held = self.shards_of(lambda x: mesh_split(x, devices, [1, -1, 0]), x)
        for (row, column), device in np.ndenumerate(devices):
            self.assertAllEqual(held[device], x[column : column + 1, :, 4 * row : 4 * row + 4])
        held = self.shards_of(lambda x: mesh_split(x, devices, [-1, -1, 0]), x)
        for (row, _), device in np.ndenumerate(devices):
            self.assertAllEqual(held[device], x[..., 4 * row : 4 * row + 4])


def _annotated(x):
    x = replicate(split(shard(x, [[0], [1]]), 1, 4))
    return mesh_split(x, np.arange(4).reshape(2, 2), [0, 1]) + 1.0


class OneDeviceTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(jit_compile=[True, False], mesh=[None, "data=1"])
    def test_annotations_do_not_change_results_on_one_device(self, jit_compile, mesh):
        x = _numbers(2, 4)
        with _on(mesh) if mesh else contextlib.nullcontext():
            result = tf.function(_annotated, jit_compile=jit_compile)(x)
            eager = _annotated(tf.constant(x))
        self.assertAllEqual(result, x + 1)
        self.assertAllEqual(eager, x + 1)


class ErrorsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (lambda x: split(x, 2, 2), r"split_dimension=2.*: the tensor has the dimensions 0 to 1"),
        (lambda x: split(x, -3, 2), "the tensor has the dimensions 0 to 1"),
        (lambda x: split(x, 0, 0), "num_partitions must be at least 1"),
        (lambda x: split(x, 0, 9), "9 partitions of dimension 0, which has only 8"),
        (lambda x: split(x, 0, 3), "uses 3 devices, but `mesh=data=4` has 4 devices"),
        (lambda x: split(x, 0, 8), "uses 8 devices, but `mesh=data=4` has 4 devices"),
        (lambda x: shard(x, [0, 1]), "1 dimensions for a tensor of rank 2"),
        (lambda x: shard(x, [[0.0], [1.0]]), "device ids must be integers, not float64"),
        (lambda x: shard(x, [[0], [-1]]), "device -1 is negative"),
        (lambda x: shard(x, [[0, 1], [2, 1]]), "device 1 is repeated"),
        (lambda x: shard(x, [[0], [4]]), "no device 4. `mesh=data=4` has 4 devices, from 0 to 3"),
        (lambda x: shard(x, np.zeros([0, 1], int)), "it lists no devices"),
        (lambda x: shard(x, np.arange(16).reshape(1, 16)), "16 partitions of dimension 1"),
        (lambda x: mesh_split(x, np.arange(4), [0]), "1 entries for a tensor of rank 2"),
        (
            lambda x: mesh_split(x, np.arange(4), [1, -1]),
            "the mesh has no dimension 1; expected 0 to 0",
        ),
        (lambda x: mesh_split(x, np.arange(4), [-2, -1]), "the mesh has no dimension -2"),
        (lambda x: mesh_split(x, np.arange(4), [0, 0]), "dimension 0 of the mesh is used more"),
        (lambda x: mesh_split(x, [0, 1, 1, 2], [0, -1]), "device 1 is repeated"),
    )
    def test_rejects_invalid_arguments(self, annotate, message):
        with _on("data=4"), self.assertRaisesRegex(ValueError, message):
            annotate(tf.ones([8, 4]))

    def test_rejects_tensors_of_unknown_rank(self):
        function = tf.function(lambda x: split(x, 0, 2), input_signature=[tf.TensorSpec(None)])
        with self.assertRaisesRegex(ValueError, "the tensor's rank is unknown"):
            function.get_concrete_function()


if __name__ == "__main__":
    testing.main()
