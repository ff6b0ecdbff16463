"""Tests which results each option of the exchange may change, with and without a mesh."""

import functools

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.functions.partition import partition
from tests.layers.moe.dispatch_names import dispatch_params

B, L, M, H, E = 8, 8, 4, 6, 8
RNG = np.random.default_rng(1)
X, D_Y = (RNG.normal(size=(B, L, M)).astype(np.float32) for _ in range(2))
MASK = np.ones((B, L), np.int32)
HOSTS = "host=2,data=4"
OVER_BOTH = "activations: B,G->host,data | E->host,data"
# Largest errors of outputs and gradients, relative to the largest value.
ERRORS = {"bfloat16": 0.004, "fp8": 0.07, "int8": 0.01}


def make(experts: int = E, group_size: int = L, dropout: float = 0.0, **options):
    params = MixtureOfExperts.params().set(
        model_dim=M,
        hidden_dim=H,
        num_experts=experts,
        group_size=group_size,
        dispatch=dispatch_params(options.pop("dispatch", "gather")),
    )
    params.experts.set(activation="gelu", dropout_rate=dropout)
    params.exchange.set(**options)
    return params.instantiate(path="moe")


def pass_of(layer, training: bool = False):
    """Returns a function (weights, input, output gradient) -> output and all gradients."""
    specs = layer.variable_specs()

    def run(theta, x, d_y):
        theta, x = annotate_weights(theta, specs), annotate(x, "BLM")
        with (
            context.scope(training=training, seed=tf.constant([1, 2])),
            tf.GradientTape() as tape,
        ):
            tape.watch((theta, x))
            y = annotate(layer.fprop(theta, x, MASK), "BLM")
        d_theta, d_x = tape.gradient(y, (theta, x), annotate(d_y, "BLM"))
        return NestedMap(y=y, d_x=annotate(d_x, "BLM"), d_theta=annotate_weights(d_theta, specs))

    return run


def on_one_device(layer, training: bool = False) -> NestedMap:
    theta = NestedMap(layer.init(1)).transform(tf.convert_to_tensor)
    return pass_of(layer, training)(theta, tf.constant(X), tf.constant(D_Y))


@functools.cache
def split(mesh: str = HOSTS, strategy: str = OVER_BOTH, **options) -> NestedMap:
    layer = make(**options)
    return partition(pass_of(layer), mesh, strategy)(layer.init(1), X, D_Y)


def errors(found: NestedMap, expected: NestedMap) -> dict[str, float]:
    """Returns the largest error relative to the largest value, by name."""
    return {
        path: float(np.abs(np.asarray(one) - np.asarray(other)).max() / np.abs(other).max())
        for (path, one), other in zip(found.flatten_items(), expected.flatten(), strict=True)
    }


def assert_all_close(found: NestedMap, expected: NestedMap, separated_by: str) -> None:
    for one, other in zip(found.flatten(), expected.flatten(), strict=True):
        assert_close(one, other, separated_by)


def quantized(x: np.ndarray) -> np.ndarray:
    """Quantizes rows to int8 in NumPy."""
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(scale > 0, scale, 1)) * scale


def to_fp8(x: np.ndarray) -> np.ndarray:
    """Rounds rows to e4m3 with a power of two for each row, in NumPy."""
    power = np.exp2(np.ceil(np.log2(np.abs(x).max(-1, keepdims=True) / 448)))
    return (x / power).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * power


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounds to bfloat16, in NumPy."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


class ExchangeTest(testing.TestCase, parameterized.TestCase):
    def assert_equal(self, found: NestedMap, expected: NestedMap) -> None:
        """Asserts that two trees are equal to the bit."""
        for (path, one), other in zip(found.flatten_items(), expected.flatten(), strict=True):
            self.assertAllEqual(one, other, msg=path)

    def test_int8_quantizes_rows_and_gradients_in_both_directions(self):
        """The computation doubles every row, so all expected values are known."""
        x, d_y = (RNG.normal(size=(2, 3, 5, 4)).astype(np.float32) for _ in range(2))
        exchange = Exchange.params().set(precision="int8").instantiate()
        with tf.GradientTape() as tape:
            source = tf.constant(x)
            tape.watch(source)
            y = exchange.run(source, lambda rows: rows * 2)
        assert_close(y, quantized(2 * quantized(x)), "float32")
        d_x = tape.gradient(y, source, tf.constant(d_y))
        assert_close(d_x, quantized(2 * quantized(d_y)), "float32")

    def test_fp8_rounds_what_goes_to_experts_and_leaves_sums_in_bfloat16(self):
        """The computation multiplies each row by three, so all expected values are known."""
        x, d_y = (RNG.normal(size=(2, 3, 5, 4)).astype(np.float32) for _ in range(2))
        exchange = Exchange.params().set(precision="fp8").instantiate()
        with tf.GradientTape() as tape:
            source = tf.constant(x)
            tape.watch(source)
            y = exchange.run(source, lambda rows: rows * 3)
        self.assertAllEqual(y, to_bfloat16(3 * to_fp8(x)))
        d_x = tape.gradient(y, source, tf.constant(d_y))
        self.assertAllEqual(d_x, to_bfloat16(3 * to_fp8(d_y)))

    @parameterized.product(dispatch=["gather", "einsum"], precision=tuple(ERRORS))
    def test_quantization_errors_are_within_the_documented_bounds(self, precision, dispatch):
        exact = on_one_device(make(dispatch=dispatch))
        found = errors(on_one_device(make(dispatch=dispatch, precision=precision)), exact)
        for path, error in found.items():
            self.assertGreater(error, 0, path)
            self.assertLess(error, ERRORS[precision], path)

    def test_exchange_in_the_activation_dtype_is_exact(self):
        def output(precision):
            layer = make(precision=precision)
            return layer.fprop(layer.init(1), tf.cast(X, tf.bfloat16), MASK)

        self.assertAllEqual(output("bfloat16"), output(""))
        self.assertNotAllEqual(output("int8"), output(""))

    @parameterized.parameters((1, [7]), (2, [3, 4]), (3, [2, 2, 3]), (7, [1] * 7), (9, [1] * 7))
    def test_chunks_have_equal_sizes_and_none_is_empty(self, chunks, sizes):
        seen = []

        def compute(x_EGCM):
            seen.append(x_EGCM.shape.as_list())
            return x_EGCM + 1

        x = tf.constant(RNG.normal(size=(2, 3, 7, 4)), tf.float32)
        y = Exchange.params().set(chunks=chunks).instantiate().run(x, compute)
        self.assertEqual(seen, [[3, 2, size, 4] for size in sizes])
        self.assertAllEqual(y, x + 1)

    @parameterized.product(precision=["", "int8"], chunks=[2, 3, 100])
    def test_chunks_do_not_change_results(self, chunks, precision):
        unchunked = on_one_device(make(precision=precision))
        chunked = on_one_device(make(precision=precision, chunks=chunks))
        assert_all_close(chunked, unchunked, "float32")

    def test_chunks_draw_independent_dropout_masks(self):
        """Dropout has no effect in evaluation. In training, masks differ between chunks."""
        rows = tf.ones([E, 1, 4, M])
        layer = make(dropout=0.5, chunks=2)
        theta = layer.init(1)
        with context.scope(training=True, seed=tf.constant([1, 2])):
            y = layer._exchange.run(
                tf.transpose(rows, (1, 0, 2, 3)), lambda x: layer.experts.fprop(theta.experts, x)
            )
        self.assertNotAllEqual(y[:, :, :2], y[:, :, 2:])
        assert_all_close(
            on_one_device(make(dropout=0.5, chunks=2)), on_one_device(make()), "float32"
        )

    def test_hierarchical_has_no_effect_on_one_device(self):
        self.assert_equal(on_one_device(make(hierarchical=True)), on_one_device(make()))

    def assert_same_outputs(self, found, expected):
        """Allows a unit in the last place: LLVM may round a product in one program only."""
        self.assertAllClose(found.y, expected.y, rtol=0, atol=2**-22)

    @parameterized.parameters({}, {"precision": "fp8"}, {"experts": 6, "precision": "int8"})
    def test_hierarchical_results_are_equal(self, **options):
        """The compiler may add up gradients of weights in another order."""
        found, expected = split(**options, hierarchical=True), split(**options)
        self.assert_same_outputs(found, expected)
        assert_all_close(found, expected, "order")

    @parameterized.parameters(
        {"precision": "int8"}, {"precision": "bfloat16"}, {"experts": 6, "group_size": 5}
    )
    @pytest.mark.slow
    def test_hierarchical_results_of_other_options_are_equal(self, **options):
        found, expected = split(**options, hierarchical=True), split(**options)
        self.assert_same_outputs(found, expected)
        assert_all_close(found, expected, "order")

    def test_all_options_on_many_devices_equal_one_device(self):
        """Allows few rows to differ by one int8 step because of float32 rounding."""
        options = {"precision": "int8", "chunks": 2}
        found = split(hierarchical=True, **options)
        step = 1 / 127
        self.assertLess(max(errors(found, on_one_device(make(**options))).values()), 2 * step)

    def test_hierarchical_on_a_mesh_with_a_model_axis(self):
        strategy = "activations: B,G->host,data | E->host,data; H->model"
        found = split("host=2,data=2,model=2", strategy, hierarchical=True)
        assert_all_close(found, on_one_device(make()), "order")

    @parameterized.parameters(
        ("pod=2,host=2,data=2", "activations: B,G->pod,host,data | E->host,data"),
        ("host=2,data=2,rail=2", "activations: B,G->host,data,rail | E->host,data,rail"),
        ("host=2,data=4", "activations: B,G->data,host | E->host,data"),
    )
    @pytest.mark.slow
    def test_hierarchical_on_other_meshes(self, mesh, strategy):
        assert_all_close(split(mesh, strategy, hierarchical=True), on_one_device(make()), "order")

    @parameterized.parameters(
        ("data=8", "expert", "splits groups over data and experts over data; it needs two axes"),
        ("data=4,model=2", "expert_tensor", "`mesh=data=4,model=2` with `strategy=expert_tensor`"),
        (HOSTS, "activations: B,G->data | E->host,data", "groups over data and experts over host"),
        (HOSTS, "B->data", "groups over nothing and experts over nothing"),
        ("host=1,data=8", OVER_BOTH, "groups over data and experts over data"),
    )
    def test_hierarchical_requires_two_axes(self, mesh, strategy, words):
        layer = make(hierarchical=True)
        with (
            use_partitioning(Partitioning.make(mesh, strategy)),
            self.assertRaisesRegex(ValueError, r"^moe\.exchange\.hierarchical: `mesh=") as raised,
        ):
            tf.function(layer.fprop, autograph=False)(layer.init(1), X, MASK)
        self.assertIn(words, str(raised.exception))

    @parameterized.parameters(
        ({"precision": "int"}, r"moe.exchange.precision: 'int'. Did you mean 'int8'\?"),
        ({"precision": "q"}, "moe.exchange.precision: 'q'. Valid: bfloat16, fp8, int8."),
    )
    def test_rejects_invalid_options(self, options, message):
        with self.assertRaisesRegex(ValueError, message):
            make(**options)


if __name__ == "__main__":
    testing.main()
