"""Tests custom_gradient, which adds the layer's name to the gradient's operations."""

import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.layer import Layer, layer_method


class Cube(Layer):
    """Computes x^3. Its custom gradient records the layer path."""

    @layer_method
    def fprop(self, theta, x):
        @custom_gradient
        def cube(x):
            def gradient(dy):
                self.seen = context.layer_path()
                return tf.multiply(dy, 3 * x * x, name="slope")

            return x * x * x, gradient

        with tf.name_scope("inner"):
            return cube(x)


def value_and_gradient(layer: Cube, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer.fprop(layer.init(1), x)
    return y, tape.gradient(y, x)


class CustomGradientTest(testing.TestCase):
    def test_the_custom_gradient_is_used(self):
        layer = Cube(Cube.params(), "a.b")
        x = tf.constant([1.0, 2.0])
        for function in (value_and_gradient, tf.function(value_and_gradient, autograph=False)):
            y, dx = function(layer, x)
            self.assertAllEqual(y, [1, 8])
            self.assertAllEqual(dx, [3, 12])

    def test_gradient_operations_carry_the_layer_name(self):
        for path, name in (
            ("a.b[1]", "gradient_tape/a/b_1/inner/slope"),
            ("", "gradient_tape/inner"),
        ):
            layer = Cube(Cube.params(), path)
            traced = tf.function(lambda x, m=layer: value_and_gradient(m, x), autograph=False)
            graph = traced.get_concrete_function(tf.TensorSpec([2])).graph
            slopes = [op.name for op in graph.get_operations() if op.name.endswith("slope")]
            self.assertEqual(len(slopes), 1)
            self.assertStartsWith(slopes[0], name)
            self.assertEqual(layer.seen, path)
            self.assertEqual(context.layer_path(), "")

    def test_supports_several_arguments_and_results(self):
        @custom_gradient
        def swap(x, y):
            return (y, x), lambda dy, dx: (10 * dx, 100 * dy)

        x, y = tf.constant(2.0), tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            first, second = swap(x, y)
            total = first + 2 * second
        self.assertEqual((float(first), float(second)), (3, 2))
        self.assertEqual([float(g) for g in tape.gradient(total, [x, y])], [20, 100])


if __name__ == "__main__":
    testing.main()
