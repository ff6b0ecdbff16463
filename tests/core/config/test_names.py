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

    def test_a_number_in_a_name_says_which_is_meant(self):
        valid = ["bfloat16", "float16", "float32", "fp8", "int8"]
        for given, meant in (("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32")):
            self.assertEqual(names.nearest(given, valid), f"Did you mean {meant!r}?")

    def test_half_the_letters_are_no_likeness(self):
        self.assertEqual(names.nearest("jp", ["ca", "ja", "de"]), "Valid: ca, de, ja.")

    def test_many_short_names_are_all_listed(self):
        languages = [f"l{index:02d}" for index in range(99)]
        self.assertEqual(names.nearest("zz", languages), f"Valid: {', '.join(languages)}.")

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
