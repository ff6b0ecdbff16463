"""Tests that libraries that are slow to import are imported when they are first used."""

import contextlib
import importlib
import importlib.util
import pathlib
import pkgutil
import subprocess
import sys
from unittest import mock

import lingvo_gshard
from lingvo_gshard import testing
from lingvo_gshard.core import lazy

SLOW = ("jax", "jaxlib", "orbax", "sacrebleu", "scipy", "tensorflow")
# Modules that run on their own with jax alone, or subclass classes of Orbax, grain or TensorFlow.
NEED_LIBRARIES = (
    "lingvo_gshard.data.batching.stream",
    "lingvo_gshard.testing",
    "lingvo_gshard.tools.benchmarks.",
    "lingvo_gshard.wings.object_stores.run_handler",
    "lingvo_gshard.training.run.checkpoint.run_handler",
    "lingvo_gshard.wings.open_models.streamed",
    "lingvo_gshard.__main__",
)
IMPORT_WITHOUT = """
import importlib, sys
sys.modules.update(dict.fromkeys({slow}))
for name in {names}:
    importlib.import_module(name)
"""


class ImportsTest(testing.TestCase):
    def test_modules_import_no_library_that_is_slow_to_import(self):
        modules = pkgutil.walk_packages(lingvo_gshard.__path__, "lingvo_gshard.")
        names = [module.name for module in modules if not module.name.startswith(NEED_LIBRARIES)]
        self.assertIn("lingvo_gshard.tools.train", names)
        code = IMPORT_WITHOUT.format(slow=SLOW, names=names)
        root = pathlib.Path(lingvo_gshard.__file__).parents[1]
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True
        )
        hint = "Import it from lingvo_gshard.core.lazy."
        self.assertEqual(result.returncode, 0, f"{hint}\n{result.stderr}")

    def test_an_unknown_attribute_raises_attribute_error(self):
        with self.assertRaisesRegex(AttributeError, "math"):
            lazy.LazyModule("math").cube_root  # noqa: B018

    def test_a_private_module_that_is_gone_is_named(self):
        self.enter_context(mock.patch.dict(sys.modules, {"tensorflow.python.gone": None}))
        message = r"no longer has its private tensorflow.python.gone.Op\."
        with self.assertRaisesRegex(ImportError, message):
            lazy.PrivateModule("tensorflow.python.gone").Op  # noqa: B018


class SurroundImportTest(testing.TestCase):
    """Tests an import inside a context, with a package that records what happens."""

    def setUp(self):
        super().setUp()
        folder = pathlib.Path(self.get_temp_dir())
        (folder / "slow_package").mkdir()
        (folder / "slow_package" / "__init__.py").write_text("value = 1\n")
        (folder / "slow_package" / "part.py").write_text("from slow_package import value\n")
        self.events = []

        @contextlib.contextmanager
        def context():
            self.events.append("begin")
            yield
            self.events.append(sys.modules["slow_package"].value)

        self.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
        self.enter_context(mock.patch.object(sys, "meta_path", [*sys.meta_path]))
        self.enter_context(mock.patch.object(lazy, "_contexts", {}))
        self.enter_context(mock.patch.object(lazy, "_used", set()))
        for name in ("slow_package", "slow_package.part"):
            self.addCleanup(sys.modules.pop, name, None)
        lazy.surround_import("slow_package", context)

    def test_a_package_is_imported_once_inside_its_context(self):
        part, package = lazy.LazyModule("slow_package.part"), lazy.LazyModule("slow_package")
        self.assertNotIn("slow_package", sys.modules)
        self.assertFalse(self.events)
        self.assertEqual((part.value, package.value), (1, 1))
        self.assertEqual(self.events, ["begin", 1])

    def test_a_package_that_others_import_first_is_imported_inside_its_context(self):
        part = importlib.import_module("slow_package.part")
        self.assertEqual(part.value, 1)
        self.assertEqual(self.events, ["begin", 1])
        self.assertEqual(lazy.LazyModule("slow_package").value, 1)
        self.assertEqual(self.events, ["begin", 1])

    def test_a_package_that_others_only_look_for_is_imported_inside_its_context(self):
        # As etils does with TensorFlow.
        self.assertIsNotNone(importlib.util.find_spec("slow_package"))
        self.assertFalse(self.events)
        self.assertEqual(lazy.LazyModule("slow_package.part").value, 1)
        self.assertEqual(self.events, ["begin", 1])

    def test_a_package_that_is_missing_stays_missing(self):
        lazy.surround_import("no_such_package", contextlib.nullcontext)
        with self.assertRaisesRegex(ModuleNotFoundError, "no_such_package"):
            importlib.import_module("no_such_package")


if __name__ == "__main__":
    testing.main()
