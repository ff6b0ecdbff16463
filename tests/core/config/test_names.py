"""Tests suggestions of the nearest valid name."""

import time

from lingvo_gshard import testing
from lingvo_gshard.core.config import names


class NearestNameTest(testing.TestCase):
    def test_suggests_the_nearest_name(self):
        self.assertEqual(
            names.nearest("learning_rat", ["steps", "learning_rate"]),
            "Did you mean 'learning_rate'?",
        )

    def test_lists_the_valid_names_if_none_is_near(self):
        self.assertEqual(names.nearest("zzz", ["b", "a"]), "Valid: a, b.")
        self.assertEqual(names.nearest("zzz", []), "There are none.")

    def test_long_lists_are_truncated(self):
        sentence = names.nearest("zzz", [f"name_{i:03d}" for i in range(100)])
        self.assertEndsWith(sentence, " and 60 more.")
        self.assertLess(len(sentence), 500)

    def test_among_very_many_names_those_with_the_same_beginning_are_compared(self):
        began = time.monotonic()
        many = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(300_000)]
        hint = names.nearest("model.layers.17.mlp.up_proj.weights", many)
        self.assertEqual(hint, "Did you mean 'model.layers.17.mlp.up_proj.weight'?")
        self.assertLess(time.monotonic() - began, 10)


if __name__ == "__main__":
    testing.main()
