"""Compares collectives of manual regions, and their gradients, with NumPy."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.sharding import collectives
from lingvo_gshard.sharding.manual import manual
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.wings.functions.partition import partition

DATA, MODEL = 4, 2
MESH = f"data={DATA},model={MODEL}"
EACH = (("data", "model"), ())
ROWS, COLUMNS = 4, 8


def _parts(x: np.ndarray) -> np.ndarray:
    """Returns the shards of an array split over both axes, [DATA, MODEL, ROWS, COLUMNS]."""
    return x.reshape(DATA, MODEL, ROWS, COLUMNS)


def _whole(parts: list[list[np.ndarray]]) -> np.ndarray:
    return np.concatenate([part for line in parts for part in line])


def _everywhere(function) -> np.ndarray:
    """Returns function(d, m) of all devices, joined as a split over both axes joins shards."""
    return _whole([[function(d, m) for m in range(MODEL)] for d in range(DATA)])


# Name: the call on a shard, the expected result of device (d, m), and the collectives.
CASES = {
    "psum over data": (
        lambda x: collectives.psum(x, "data"),
        lambda p, d, m: p[:, m].sum(0),
        {"all-reduce": 1},
    ),
    "psum over both": (
        lambda x: collectives.psum(x, ("data", "model")),
        lambda p, d, m: p.sum((0, 1)),
        {"all-reduce": 1},
    ),
    "reduce_scatter over model": (
        lambda x: collectives.reduce_scatter(x, "model", 1),
        lambda p, d, m: np.split(p[d].sum(0), MODEL, axis=1)[m],
        {"all-reduce": 1},
    ),
    "all_gather over data": (
        lambda x: collectives.all_gather(x, "data", 1),
        lambda p, d, m: np.concatenate(list(p[:, m]), axis=1),
        {"all-gather": 1},
    ),
    "all_gather over both, model first": (
        lambda x: collectives.all_gather(x, ("model", "data"), -1),
        lambda p, d, m: np.concatenate([p[i, j] for j in range(MODEL) for i in range(DATA)], 1),
        {"all-gather": 1},
    ),
    "all_to_all over data": (
        lambda x: collectives.all_to_all(x, "data", 1, 0),
        lambda p, d, m: np.concatenate([np.split(x, DATA, 1)[d] for x in p[:, m]]),
        {"all-to-all": 1},
    ),
    "all_to_all over model, the other way": (
        lambda x: collectives.all_to_all(x, ("model",), 0, 1),
        lambda p, d, m: np.concatenate([np.split(x, MODEL, 0)[m] for x in p[d]], axis=1),
        {"all-to-all": 1},
    ),
    "rotate along data": (
        lambda x: collectives.rotate(x, "data"),
        lambda p, d, m: p[(d - 1) % DATA, m],
        {"collective-permute": 1},
    ),
    "rotate back along data by two": (
        lambda x: collectives.rotate(x, "data", -2),
        lambda p, d, m: p[(d + 2) % DATA, m],
        {"collective-permute": 1},
    ),
    "axis_index": (
        lambda x: (
            x * tf.cast(10 * collectives.axis_index("data"), tf.float32)
            + x * tf.cast(collectives.axis_index("model"), tf.float32)
        ),
        lambda p, d, m: p[d, m] * (10 * d + m),
        {},
    ),
}


class CollectivesTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(*CASES)
    def test_values_gradients_and_communication(self, case):
        """Checks gradients by <call(v), c> = <v, gradient>, since all collectives are linear."""
        call, wanted, moved = CASES[case]
        rng = np.random.default_rng(0)
        x, v = rng.standard_normal((2, DATA * MODEL * ROWS, COLUMNS)).astype(np.float32)
        expected = _everywhere(lambda d, m: wanted(_parts(x), d, m))
        weights = rng.standard_normal(expected.shape).astype(np.float32)

        def forward(x):
            return manual(call, [EACH], EACH)(x)

        def gradient(x, weights):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(forward(x) * weights)
            return tape.gradient(loss, x)

        split = partition(forward, MESH)
        self.assertAllClose(split(x), expected, rtol=1e-5, atol=1e-5)
        self.assertCollectives(split, x, expected=moved)
        found = partition(gradient, MESH)(x, weights)
        along_v = np.vdot(_everywhere(lambda d, m: wanted(_parts(v), d, m)), weights)
        self.assertAllClose(np.vdot(v, found), along_v, rtol=1e-4, atol=0)

    def test_integers_are_exchanged_as_integers(self):
        """Exchanges int8 values, which take a fourth of the bytes of float32."""
        x = np.arange(DATA * MODEL * ROWS * COLUMNS, dtype=np.int8).reshape(-1, COLUMNS)

        def exchange(x):
            return manual(lambda x: collectives.all_to_all(x, "data", 1, 0), [EACH], EACH)(x)

        found = partition(exchange, MESH)(x)
        expected = _everywhere(lambda d, m: CASES["all_to_all over data"][1](_parts(x), d, m))
        self.assertAllEqual(found, expected)
        self.assertEqual(found.dtype, np.int8)

    def test_collectives_are_the_identity_on_one_device(self):
        x = tf.ones([2, 4])
        self.assertIs(collectives.psum(x, "data"), x)
        self.assertIs(collectives.reduce_scatter(x, "data", 0), x)
        self.assertIs(collectives.all_gather(x, "data", 0), x)
        self.assertIs(collectives.all_to_all(x, "data", 0, 1), x)
        self.assertIs(collectives.rotate(x, "data"), x)
        self.assertEqual(collectives.axis_index("data"), 0)

    @parameterized.parameters(
        (lambda x: collectives.psum(x, "dta"), "no axis 'dta'. Did you mean 'data'?"),
        (lambda x: collectives.reduce_scatter(x, "data", 1), "Dimension 1 .* by the 4 devices"),
        (lambda x: collectives.all_to_all(x, "data", 1, 0), "Dimension 1 .* by the 4 devices"),
        (lambda x: collectives.all_to_all(x, "data", 0, -2), "both dimensions are 0"),
    )
    def test_rejects_invalid_arguments(self, call, message):
        traced = tf.function(lambda x: manual(call, [EACH], EACH)(x), autograph=False)
        with use_partitioning(Partitioning.make(MESH, "replicated")):
            with self.assertRaisesRegex(ValueError, message):
                traced.get_concrete_function(tf.TensorSpec([32, 6]))


if __name__ == "__main__":
    testing.main()
