"""Tests the registry of experiments."""

from unittest import mock

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.registry import Experiment
from lingvo_gshard.core.seams import Seam


def _quickstart():
    """Learns in minutes.

    Expected: something.
    """
    return Experiment.params()


class RegistryTest(testing.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(registry, "_EXPERIMENTS", Seam("none")))

    def test_experiments_are_looked_up_by_name(self):
        self.assertIs(registry.register("translation.quickstart")(_quickstart), _quickstart)
        self.assertEqual(registry.get("translation.quickstart").name, "translation.quickstart")
        self.assertEqual(registry.names(), ("translation.quickstart",))
        self.assertStartsWith(
            registry.describe("translation.quickstart"), "Learns in minutes.\n\nExpected"
        )

    def test_each_call_returns_new_params(self):
        registry.register("a.b")(_quickstart)
        registry.get("a.b").name = "changed"
        self.assertEqual(registry.get("a.b").name, "a.b")

    def test_a_short_name_is_found_by_its_module_too(self):
        registry.register("mine")(_quickstart)
        self.assertEqual(registry.get("mine").name, "mine")
        for last in ("mine", "_quickstart"):
            name = f"{_quickstart.__module__}.{last}"
            self.assertEqual(registry.get(name).name, name)
        with self.assertRaisesRegex(ValueError, "found by its module, such as my_module.theirs"):
            registry.get("theirs")

    @parameterized.parameters(registry.get, registry.describe)
    def test_an_unknown_experiment_suggests_the_nearest(self, look_up):
        registry.register("translation.quickstart")(_quickstart)
        with self.assertRaisesRegex(
            ValueError, "'translation.quikstart'.*'translation.quickstart'"
        ):
            look_up("translation.quikstart")

    def test_rejects_duplicate_names(self):
        registry.register("a.b")(_quickstart)
        with self.assertRaisesRegex(ValueError, "already registered"):
            registry.register("a.b")(_quickstart)

    @parameterized.parameters("", "a b", "a..b", "a/b")
    def test_rejects_names_that_are_not_identifiers(self, name):
        with self.assertRaisesRegex(ValueError, "cannot name an experiment"):
            registry.register(name)

    def test_experiments_require_a_docstring(self):
        with self.assertRaisesRegex(ValueError, "docstring"):
            registry.register("a.b")(lambda: Experiment.params())


if __name__ == "__main__":
    testing.main()
