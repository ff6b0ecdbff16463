"""Tests that the planner finds in a loop's name how often the loop usually runs."""

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.scopes import loop_name, trips_of


class ExpectedTripsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(0, 1, 128)
    def test_names_tell_trips(self, trips):
        name = loop_name(trips)
        self.assertEqual(trips_of(name), trips)
        # TensorFlow numbers equal names, and the compiler puts scopes before them.
        self.assertEqual(trips_of(f"jit(call)/decoder/layers/{name}_3"), trips)

    def test_other_names_tell_none(self):
        self.assertIsNone(trips_of("decoder/layers/while_3"))

    def test_the_innermost_name_counts(self):
        self.assertEqual(trips_of("expected_8_trips/x/expected_2_trips_1"), 2)


if __name__ == "__main__":
    testing.main()
