"""Tests Layer: paths, specs, stateless initialization, and values reported to the context."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context, initializers, random_numbers
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.nested_map import NestedMap


class Dense(Layer):
    """Computes x w."""

    @classmethod
    def params(cls):
        p = super().params()
        p.define("sizes", {"M": 3, "H": 4}, "Sizes by letter.")
        p.define("layout", "MH", "Letters of the weight.")
        return p

    def __init__(self, params, path=""):
        super().__init__(params, path)
        self.create_variable("w", self.p.layout, self.p.sizes, initializers.normal(1.0))

    @layer_method
    def fprop(self, theta, x):
        y = self.observe(tf.matmul(x, theta.w))
        if context.current().training:
            y += random_numbers.normal(y.shape, self.random_seed("noise"))
        self.add_metric("mean", tf.reduce_mean(y), weight=2)
        self.add_loss("square", tf.reduce_sum(y * y))
        return y


class Stack(Layer):
    """A list of layers and a head."""

    @classmethod
    def params(cls):
        p = super().params()
        p.define("head", Dense.params(), "The head.")
        p.define("layers", [Dense.params().set(sizes={"M": 3, "H": 3})] * 2, "The layers.")
        return p

    def __init__(self, params, path=""):
        super().__init__(params, path)
        self.create_children("layers", self.p.layers)
        self.create_child("head", self.p.head)

    @layer_method
    def fprop(self, theta, x):
        for layer, weights in zip(self.layers, theta.layers, strict=True):
            x = layer.fprop(weights, x)
        return self.head.fprop(theta.head, x)


PATHS = ["head.w", "layers[0].w", "layers[1].w"]


class WeightsTest(testing.TestCase):
    def test_children_and_weights_have_paths(self):
        stack = Stack(Stack.params())
        self.assertEqual([path for path, _ in stack.variable_specs().flatten_items()], PATHS)
        self.assertEqual([spec.path for spec in stack.variable_specs().flatten()], PATHS)
        self.assertEqual(stack.layers[1].path, "layers[1]")
        self.assertEqual(stack.head.path, "head")
        self.assertEqual(list(stack.children), ["layers", "head"])

    def test_specs_hold_layout_shape_and_dtype(self):
        spec = Dense(Dense.params().set(dtype="bfloat16"), path="a.b").variable_specs().w
        self.assertEqual(
            (spec.path, spec.layout, spec.shape, spec.dtype), ("a.b.w", "MH", (3, 4), "bfloat16")
        )
        self.assertEqual(spec.init(tf.constant([1, 0])).dtype, tf.bfloat16)

    def test_weights_inherit_the_dtype_of_their_parent(self):
        params = Stack.params().set(dtype="bfloat16")
        params.head.dtype = "float16"
        types = {spec.path: spec.dtype for spec in Stack(params).variable_specs().flatten()}
        self.assertEqual(
            types, {"layers[0].w": "bfloat16", "layers[1].w": "bfloat16", "head.w": "float16"}
        )
        self.assertEqual(Stack(Stack.params()).variable_specs().head.w.dtype, "float32")

    def test_theta_depends_only_on_seed_and_path(self):
        stack = Stack(Stack.params())
        theta, again, other = stack.init(1), stack.init(1), stack.init(2)
        self.assertEqual([path for path, _ in theta.flatten_items()], PATHS)
        for one, same, different in zip(
            theta.flatten(), again.flatten(), other.flatten(), strict=True
        ):
            self.assertAllEqual(one, same)
            self.assertFalse(np.allclose(one, different))
        self.assertFalse(np.allclose(theta.layers[0].w, theta.layers[1].w))
        separate = Dense(Dense.params(), path="head").init(1)
        self.assertAllEqual(separate.w, theta.head.w)

    def test_theta_is_the_same_when_compiled(self):
        stack = Stack(Stack.params())
        compiled = tf.function(lambda: stack.init(1), jit_compile=True)()
        for one, same in zip(stack.init(1).flatten(), compiled.flatten(), strict=True):
            self.assertAllClose(one, same, rtol=1e-6, atol=0)


class CallTest(testing.TestCase):
    def test_fprop_equals_numpy(self):
        stack = Stack(Stack.params())
        theta = stack.init(1)
        x = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
        expected = x @ theta.layers[0].w.numpy() @ theta.layers[1].w.numpy() @ theta.head.w.numpy()
        self.assertAllClose(stack.fprop(theta, tf.constant(x)), expected, rtol=1e-5, atol=0)

    def test_losses_and_metrics_are_collected_by_path(self):
        stack = Stack(Stack.params())
        seen = []
        with context.scope(on_output=lambda path, output: seen.append(path)) as ctx:
            stack.fprop(stack.init(1), tf.ones([5, 3]))
        self.assertEqual(list(ctx.losses), ["layers[0]/square", "layers[1]/square", "head/square"])
        self.assertEqual(list(ctx.metrics), ["layers[0]/mean", "layers[1]/mean", "head/mean"])
        self.assertEqual(float(ctx.metrics["head/mean"][1]), 2.0)
        self.assertEqual(seen, ["layers[0]", "layers[1]", "head"])

    def test_random_numbers_depend_on_the_seed_and_the_path(self):
        stack = Stack(Stack.params())
        theta = stack.init(1)

        @tf.function
        def noisy(seed):
            with context.scope(training=True, seed=seed):
                return stack.fprop(theta, tf.zeros([5, 3])), stack.layers[0].random_seed("noise")

        (one, key), (same, _), (other, _) = (noisy(tf.constant([s, 7])) for s in (1, 1, 2))
        self.assertAllEqual(one, same)
        self.assertFalse(np.allclose(one, other))
        with context.scope(training=True, seed=tf.constant([1, 7])):
            self.assertAllEqual(key, stack.layers[0].random_seed("noise"))
            self.assertFalse(np.array_equal(key, stack.layers[1].random_seed("noise")))

    def test_random_numbers_require_a_seed(self):
        dense = Dense(Dense.params(), path="encoder.dense")
        with (
            context.scope(training=True),
            self.assertRaisesRegex(ValueError, "encoder.dense.noise needs"),
        ):
            dense.fprop(dense.init(1), tf.zeros([1, 3]))


class ErrorsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters("ME", "MG")
    def test_rejects_letters_without_a_positive_size(self, layout):
        params = Dense.params().set(layout=layout, sizes={"M": 3, "G": 0})
        with self.assertRaisesRegex(ValueError, f"encoder.w: dimension '{layout[1]}'"):
            Dense(params, path="encoder")

    def test_rejects_duplicate_names_within_a_layer(self):
        dense = Dense(Dense.params(), path="encoder")
        with self.assertRaisesRegex(ValueError, "encoder.w is already"):
            dense.create_variable("w", "M", {"M": 1}, initializers.constant(0.0))
        with self.assertRaisesRegex(ValueError, "encoder.w is already"):
            dense.create_child("w", Dense.params())

    def test_an_unknown_attribute_raises_attribute_error(self):
        with self.assertRaisesRegex(AttributeError, "Stack has no attribute or child 'tail'"):
            _ = Stack(Stack.params()).tail

    def test_a_layer_copies_its_params(self):
        params = Stack.params()
        stack = Stack(params)
        params.head.sizes["H"] = 7
        self.assertEqual(stack.head.variable_specs(), NestedMap(w=stack.head.variable_specs().w))
        self.assertEqual(stack.head.variable_specs().w.shape, (3, 4))


class Nested(Dense):
    """Computes nested products, each under the layer's name."""

    @layer_method
    def fprop(self, theta, x):
        with tf.name_scope("outer"):
            self.seen = [(context.layer_path(), tf.get_current_name_scope())]
            return self._product(theta, super().fprop(theta, x))

    @layer_method
    def _product(self, theta, x):
        self.seen.append((context.layer_path(), tf.get_current_name_scope()))
        return tf.matmul(x, theta.w, name="product")

    def without_theta(self, x):
        return context.layer_path(), tf.get_current_name_scope()


def operations(function, *shapes: list[int]) -> list[str]:
    """Returns the names of the matrix products in a function's graph."""
    specs = [tf.TensorSpec(shape) for shape in shapes]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return [op.name for op in graph.get_operations() if op.type == "MatMul"]


class WithAnyArguments(Dense):
    """A layer whose methods have unusual argument names."""

    @layer_method
    def attend(self, parameters, *, queries):
        return self.where(queries)

    @layer_method
    def where(self, x):
        return context.layer_path(), tf.get_current_name_scope()


class NamesOfOperationsTest(testing.TestCase):
    def test_operations_are_named_for_their_layer(self):
        stack = Stack(Stack.params(), path="task.encoder")
        theta = stack.init(1)

        def called_anywhere(x):
            with tf.name_scope("loss"):
                return stack.fprop(theta, x)

        expected = [f"task/encoder/{name}/MatMul" for name in ("layers_0", "layers_1", "head")]
        self.assertEqual(operations(called_anywhere, [5, 3]), expected)

    def test_the_root_adds_no_name_scope(self):
        root = Dense(Dense.params())
        self.assertEqual(operations(lambda x: root.fprop(root.init(1), x), [5, 3]), ["MatMul"])

    def test_gradients_are_named_for_their_layer_too(self):
        dense = Dense(Dense.params(), path="head")
        theta = dense.init(1)

        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(theta.w)
                y = tf.reduce_sum(dense.fprop(theta, x))
            return tape.gradient(y, theta.w)

        backward = [name for name in operations(gradient, [5, 3]) if name != "head/MatMul"]
        self.assertTrue(backward)
        self.assertTrue(all(name.startswith("gradient_tape/head/") for name in backward))

    def test_name_scopes_within_a_layer_are_preserved(self):
        nested = Nested(Nested.params().set(sizes={"M": 3, "H": 3}), path="layers[0].nested")
        theta = nested.init(1)
        outer = "layers_0/nested/outer"
        names = operations(lambda x: nested.fprop(theta, x), [5, 3])
        self.assertEqual(names, [f"{outer}/MatMul", f"{outer}/product"])
        self.assertEqual(nested.seen, [("layers[0].nested", outer)] * 2)
        self.assertEqual(nested.without_theta(tf.zeros([5, 3])), ("", ""))

    def test_the_layer_path_is_reset_after_the_call(self):
        dense = Nested(Nested.params().set(sizes={"M": 3, "H": 3}), path="a.b")
        other = Nested(Nested.params().set(sizes={"M": 3, "H": 3}), path="a")
        dense.fprop(dense.init(1), tf.ones([5, 3]))
        other.fprop(other.init(1), tf.ones([5, 3]))
        self.assertEqual(dense.seen, [("a.b", "a/b/outer")] * 2)
        self.assertEqual(other.seen, [("a", "a/outer")] * 2)
        with self.assertRaises(tf.errors.InvalidArgumentError):
            dense.fprop(dense.init(1), tf.ones([5, 4]))
        self.assertEqual((context.layer_path(), tf.get_current_name_scope()), ("", ""))

    def test_decorated_methods_can_have_arguments_of_any_name(self):
        layer = WithAnyArguments(WithAnyArguments.params(), path="a.b")
        self.assertEqual(layer.attend(None, queries=None), layer.where(None))
        self.assertEqual(layer.where(None), ("a.b", "a/b"))

    def test_rejects_overrides_without_the_decorator(self):
        message = r"Undecorated\.attend overrides a @layer_method and lacks the decorator"
        with self.assertRaisesRegex(TypeError, message):

            class Undecorated(WithAnyArguments):
                def attend(self, parameters, *, queries):
                    return parameters

    def test_paths_are_converted_to_valid_name_scopes(self):
        for path, name in (("my layer.é", "my_layer/_"), ("_own.x[3][1]", "own/x_3_1")):
            dense = Dense(Dense.params(), path=path)
            theta = dense.init(1)
            names = operations(lambda x, d=dense, t=theta: d.fprop(t, x), [5, 3])
            self.assertEqual(names, [f"{name}/MatMul"])

    def test_decorated_methods_keep_their_names_and_docstrings(self):
        self.assertEqual(Stack.fprop.__name__, "fprop")
        self.assertEqual(Dense.fprop.__qualname__, "Dense.fprop")
        self.assertEqual(Nested.without_theta(Dense(Dense.params()), None), ("", ""))

    def test_layers_run_in_functions_converted_by_autograph(self):
        stack = Stack(Stack.params(), path="s")
        theta = stack.init(1)
        x = tf.ones([5, 3])
        self.assertAllClose(
            tf.function(lambda x: stack.fprop(theta, x))(x),
            stack.fprop(theta, x),
            rtol=1e-6,
            atol=0,
        )


class DeclarationsTest(testing.TestCase):
    def test_paths_of_all_layers_are_listed(self):
        self.assertEqual(
            Stack(Stack.params()).layer_paths(), ["", "layers[0]", "layers[1]", "head"]
        )
        self.assertEqual(Dense(Dense.params(), path="a.b").layer_paths(), ["a.b"])

    def test_layers_can_declare_letters_that_no_strategy_splits(self):
        dense = Dense(Dense.params(), path="a")
        dense.create_variable("v", "MH", {"M": 2, "H": 3}, initializers.constant(0.0), unsplit="H")
        specs = dense.variable_specs()
        self.assertEqual((specs.v.unsplit, specs.w.unsplit), ("H", ""))
        with self.assertRaisesRegex(ValueError, "a.u: unsplit letter 'E' is not in layout 'MH'"):
            dense.create_variable(
                "u", "MH", {"M": 2, "H": 3}, initializers.constant(0.0), unsplit="E"
            )


if __name__ == "__main__":
    testing.main()
