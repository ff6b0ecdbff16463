"""Compares manual regions with the same computation on unsplit arrays."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.sharding import annotate, collectives, einsum
from lingvo_gshard.sharding.manual import (
    annotate_stack,
    full_to_shard,
    manual,
    own_shard,
    resolve,
    shard_to_full,
    stack_of_shards,
)
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.wings.functions.partition import partition

MESH = "data=4,model=2"
BY_DATA = (("data",), ())
WHOLE = ((), ())


def _array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _gradients(function):
    """Returns a function that computes the gradients of the sum of squares of a result."""

    def compute(*arguments):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            loss = tf.reduce_sum(tf.square(function(*arguments)))
        return tape.gradient(loss, arguments)

    return compute


def _feed_forward(x, w_in, w_out):
    """Computes a feed-forward layer with split hidden units and an all-reduce."""

    def on_shard(x, w_in, w_out):
        return collectives.psum(tf.nn.relu(x @ w_in) @ w_out, "model")

    splits = [BY_DATA, ((), ("model",)), (("model",), ())]
    return manual(on_shard, splits, BY_DATA)(x, w_in, w_out)


class Experts(Layer):
    """A custom layer in which each device applies its own experts in a manual region."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("num_experts", 8, "Experts.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        sizes = {"E": params.num_experts, "M": 3, "H": 4}
        self.create_variable("w_in", "EMH", sizes, initializers.fan_in(3))

    @layer_method
    def fprop(self, theta, x_ECM: tf.Tensor) -> tf.Tensor:
        def on_shard(x, w_in):
            return tf.nn.relu(einsum("ECM,EMH->ECH", x, w_in))

        return manual(on_shard, ["ECM", "EMH"], "ECH")(annotate(x_ECM, "ECM"), theta.w_in)


class ManualTest(testing.TestCase, parameterized.TestCase):
    def test_every_device_computes_on_its_shard(self):
        def on_shard(x):
            self.assertEqual(x.shape, [2, 6])
            return x * 3.0 + tf.reduce_max(x) + tf.range(6, dtype=tf.float32)

        x = _array(8, 6)
        expected = np.concatenate([3 * part + part.max() + np.arange(6) for part in np.split(x, 4)])
        split = partition(lambda x: manual(on_shard, [BY_DATA], BY_DATA)(x), MESH)
        self.assertAllClose(split(x), expected, rtol=1e-6, atol=0)
        self.assertCollectives(split, x, expected={})

    def test_a_feed_forward_layer_and_its_gradient(self):
        x, w_in, w_out = _array(8, 6), _array(6, 4, seed=1), _array(4, 6, seed=2)
        h = np.maximum(x @ w_in, 0)
        y = h @ w_out
        split = partition(_feed_forward, MESH)
        self.assertAllClose(split(x, w_in, w_out), y, rtol=1e-5, atol=1e-5)
        self.assertCollectives(split, x, w_in, w_out, expected={"all-reduce": 1})

        dy = 2 * y
        dh = (dy @ w_out.T) * (h > 0)
        found = partition(_gradients(_feed_forward), MESH)(x, w_in, w_out)
        self.assertAllClose(found, [dh @ w_in.T, x.T @ dh, h.T @ dy], rtol=1e-4, atol=1e-4)

    def test_gradients_compute_in_the_region_of_their_call(self):
        """Splits hidden units by hand; `tensor` would split those of a device once more."""

        def on_shard(x, w_in, w_out):
            h = tf.nn.relu(einsum("BLM,MH->BLH", x, w_in))
            return collectives.psum(einsum("BLH,HM->BLM", h, w_out), "model")

        def function(x, w_in, w_out):
            rows = (("data",), (), ())
            splits = [rows, ((), ("model",)), (("model",), ())]
            return manual(on_shard, splits, rows)(x, w_in, w_out)

        x, w_in, w_out = _array(8, 2, 6), _array(6, 4, seed=1), _array(4, 6, seed=2)
        arguments = [tf.constant(a) for a in (x, w_in, w_out)]
        expected = _gradients(function)(*arguments)
        found = partition(_gradients(function), MESH, "tensor")
        self.assertAllClose(found(x, w_in, w_out), expected, rtol=1e-4, atol=1e-4)
        # Sums of the result, of its gradient, of the gradient of x, and one of both weights'.
        self.assertCollectives(found, x, w_in, w_out, expected={"all-reduce": 4})

    @parameterized.parameters(
        (BY_DATA,),
        (((), ("model",)),),
        ((("data", "model"), ()),),
        (WHOLE,),
    )
    def test_the_gradient_counts_every_copy_once(self, split):
        """Expects d(sum of (x * x) squared) = 4 x^3, however often x is replicated."""
        x = _array(8, 6)

        def region(x):
            return shard_to_full(tf.square(full_to_shard(x, split)), split)

        (found,) = partition(_gradients(region), MESH)(x)
        self.assertAllClose(found, 4 * x**3, rtol=1e-5, atol=1e-6)

    @parameterized.parameters((tf.float32, "f32"), (tf.bfloat16, "bf16"))
    def test_gradients_of_copies_are_added_in_their_own_type(self, dtype, name):
        """Eight devices send gradients of 16 bits as they are."""
        rows = (("data", "model"), ())

        def gradient(x, w):
            x, w = tf.cast(x, dtype), tf.cast(w, dtype)
            with tf.GradientTape() as tape:
                tape.watch(w)
                y = manual(tf.matmul, [rows, WHOLE], rows)(x, w)
            return tf.cast(tape.gradient(y, w), tf.float32)

        x, w = _array(16, 6), _array(6, 4, seed=1)
        found = partition(gradient, MESH)
        expected = np.tile(x.sum(0)[:, np.newaxis], 4)
        self.assertAllClose(found(x, w), expected, rtol=2e-2, atol=5e-2)
        text = found.lower(x, w).exported().mlir_module()
        self.assertIn(f"(tensor<8x6x4x{name}>, tensor<{name}>) -> tensor<6x4x{name}>", text)

    def test_regions_and_loops_can_be_nested(self):
        def step(x):
            return x + 0.1 * collectives.psum(tf.tanh(x), "data")

        def repeated(function, x):
            return tf.while_loop(
                lambda i, _: i < 3, lambda i, x: (i + 1, function(x)), (0, x), maximum_iterations=3
            )[1]

        def loop_in_region(x):
            return manual(lambda x: repeated(step, x), [BY_DATA], BY_DATA)(x)

        def region_in_loop(x):
            return repeated(manual(step, [BY_DATA], BY_DATA), x)

        x = _array(8, 6)
        expected = x
        for _ in range(3):
            expected = expected + 0.1 * np.tile(sum(np.split(np.tanh(expected), 4)), (4, 1))
        slopes = []
        for function in (loop_in_region, region_in_loop):
            self.assertAllClose(partition(function, MESH)(x), expected, rtol=1e-5, atol=1e-6)
            slopes.append(partition(_gradients(function), MESH)(x))
        self.assertAllClose(*slopes, rtol=1e-4, atol=1e-5)

    @parameterized.parameters("expert", "tensor", "expert_tensor", "replicated")
    def test_a_custom_layer_splits_by_letters(self, strategy):
        layer = Experts(Experts.params())
        theta = layer.init(0)
        x = _array(8, 2, 3)
        expected = np.maximum(np.einsum("ecm,emh->ech", x, theta.w_in), 0)
        self.assertAllClose(layer.fprop(theta, tf.constant(x)), expected, rtol=1e-5, atol=0)

        def function(x, w_in):
            return layer.fprop(type(theta)(w_in=w_in), x)

        split, w_in = partition(function, MESH, strategy), theta.w_in.numpy()
        self.assertAllClose(split(x, w_in), expected, rtol=1e-5, atol=1e-6)
        self.assertCollectives(split, x, w_in, expected={})

    def test_a_loop_can_carry_shards_between_regions(self):
        """Returns all copies of the rows, which differ by device, without communication."""

        def function(x):
            part = full_to_shard(x, BY_DATA)
            part += tf.cast(collectives.axis_index("model"), tf.float32)
            carried = stack_of_shards(part)
            _, carried = tf.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, 2.0 * y), (tf.constant(0), carried)
            )
            back = own_shard(annotate_stack(carried, 0))
            return shard_to_full(back[tf.newaxis], (("model",), ("data",), ()))

        x = _array(8, 6)
        split = partition(function, MESH)
        self.assertAllClose(split(x), 8 * np.stack([x, x + 1]), rtol=1e-6, atol=0)
        self.assertCollectives(split, x, expected={})

    def test_regions_can_return_several_results(self):
        def on_shard(x, y):
            return x + y, collectives.psum(tf.reduce_sum(x), ("data", "model")) / 2.0

        def function(x, y):
            return manual(on_shard, [BY_DATA, BY_DATA], [BY_DATA, ()])(x, y)

        x, y = _array(8, 6), _array(8, 6, seed=1)
        total, summed = partition(function, MESH)(x, y)
        self.assertAllClose(total, x + y, rtol=1e-6, atol=0)
        self.assertAllClose(summed, x.sum(), rtol=1e-5, atol=0)

    def test_letters_can_be_resolved_in_a_region(self):
        def on_shard(x):
            (axes,) = [axes for axes in resolve("BM", 2) if axes]
            self.assertEqual(axes, ("data",))
            return collectives.psum(x, axes)

        def function(x):
            return manual(on_shard, ["BM"], WHOLE)(x)

        x = _array(8, 6)
        found = partition(function, MESH, "data")(x)
        self.assertAllClose(found, sum(np.split(x, 4)), rtol=1e-5, atol=1e-6)
        self.assertEqual(resolve("BM", 2), WHOLE)

    @parameterized.parameters(None, "data=1,model=1")
    def test_the_same_code_runs_on_one_device(self, mesh):
        x, w_in, w_out = _array(8, 6), _array(6, 4, seed=1), _array(4, 6, seed=2)
        expected = np.maximum(x @ w_in, 0) @ w_out
        with use_partitioning(mesh and Partitioning.make(mesh, "replicated")):
            for function in (_feed_forward, tf.function(_feed_forward, jit_compile=True)):
                found = function(tf.constant(x), w_in, w_out)
                self.assertAllClose(found, expected, rtol=1e-5, atol=1e-5)


def _identity(x):
    return x


class ErrorsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (lambda x: full_to_shard(x[:6], BY_DATA), "dimension 0 of .6, 6. .* 4 parts of data in"),
        (lambda x: full_to_shard(x, ((), ("modle",))), "no axis 'modle'. Did you mean 'model'?"),
        (lambda x: full_to_shard(x, "BX"), "'X' names no dimension"),
        (lambda x: full_to_shard(x, "B"), "B does not split a tensor of rank 2"),
        (lambda x: manual(_identity, [BY_DATA], BY_DATA)(x, x), "_identity.: 2 arguments for 1"),
        (
            lambda x: manual(lambda x: [x, x], [BY_DATA], [BY_DATA])(x),
            "2 results for 1 splits",
        ),
        (
            lambda x: manual(lambda part: part + x[0], [BY_DATA], BY_DATA)(x),
            "computes with x:0, of shape .8, 6., which is not a shard. Pass it as an argument",
        ),
    )
    def test_rejects_invalid_arguments(self, function, message):
        traced = tf.function(function, autograph=False)
        with use_partitioning(Partitioning.make(MESH, "data")):
            with self.assertRaisesRegex(ValueError, message):
                traced.get_concrete_function(tf.TensorSpec([8, 6], name="x"))


if __name__ == "__main__":
    testing.main()
