"""Tests the names of layers in a loop, where one body represents several layers."""

import hypothesis
import hypothesis.strategies as st
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.repetition import Iteration, Repetition

TWO = Repetition("encoder.layers", body=2, times=3)


class RepetitionTest(testing.TestCase, parameterized.TestCase):
    def test_a_body_of_two_layers_represents_every_second_layer(self):
        self.assertEqual(
            TWO.paths("encoder.layers.body[1].moe.w_in"),
            [f"encoder.layers[{i}].moe.w_in" for i in (1, 3, 5)],
        )
        self.assertEqual(
            TWO.paths("encoder.layers.body[0]"), [f"encoder.layers[{i}]" for i in (0, 2, 4)]
        )

    @parameterized.parameters("decoder.layers.body[0].w", "encoder.layers", "", "encoder.norm")
    def test_names_outside_the_body_are_unchanged(self, path):
        self.assertEqual(TWO.paths(path), [path] * 3)

    @hypothesis.settings(deadline=None)
    @hypothesis.given(st.integers(1, 5), st.integers(1, 6))
    def test_every_layer_is_named_once(self, body, times):
        repetition = Repetition("stack", body, times)
        found = [repetition.paths(f"stack.body[{i}].w") for i in range(body)]
        in_order = [found[i][r] for r in range(times) for i in range(body)]
        self.assertEqual(in_order, [f"stack[{i}].w" for i in range(body * times)])

    def test_path_of_an_iteration(self):
        path = "encoder.layers.body[1].dropout"
        self.assertEqual(Iteration(TWO, 2).path(path), "encoder.layers[5].dropout")
        self.assertEqual(Iteration(TWO, tf.constant(2)).path(path), path)

    def test_random_numbers_equal_those_of_separate_layers(self):
        path = "encoder.layers.body[1].dropout"

        @tf.function
        def word(index):
            return Iteration(TWO, index).word(path)

        for r, name in enumerate(TWO.paths(path)):
            self.assertEqual(int(word(tf.constant(r))), random_numbers.word(name))
            self.assertEqual(int(Iteration(TWO, r).word(path)), random_numbers.word(name))


if __name__ == "__main__":
    testing.main()
