"""Tests that libraries that are slow to import are imported when they are first used."""

import contextlib
import importlib
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import lingvo_gshard
from lingvo_gshard.core import lazy

SLOW = ("jax", "jaxlib", "orbax", "sacrebleu", "scipy", "tensorflow")
# Modules that run on their own with jax alone, or subclass classes of Orbax, grain or TensorFlow.
NEED_LIBRARIES = (
    "lingvo_gshard.data.prepared.stream",
    "lingvo_gshard.testing",
    "lingvo_gshard.tools.benchmarks.",
    "lingvo_gshard.training.run.checkpoint.places",
    "lingvo_gshard.training.run.checkpoint.run_item",
    "lingvo_gshard.training.run.checkpoint.streamed",
    "lingvo_gshard.__main__",
)
IMPORT_WITHOUT = """
import importlib, sys
sys.modules.update(dict.fromkeys({slow}))
for name in {names}:
    importlib.import_module(name)
"""


def test_modules_import_no_library_that_is_slow_to_import():
    modules = pkgutil.walk_packages(lingvo_gshard.__path__, "lingvo_gshard.")
    names = [module.name for module in modules if not module.name.startswith(NEED_LIBRARIES)]
    assert "lingvo_gshard.tools.train" in names
    code = IMPORT_WITHOUT.format(slow=SLOW, names=names)
    root = pathlib.Path(lingvo_gshard.__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    hint = "Import it from lingvo_gshard.core.lazy."
    assert result.returncode == 0, f"{hint}\n{result.stderr}"


@pytest.fixture
def events(monkeypatch, tmp_path):
    """Returns what the context of slow_package, which can be imported, has recorded."""
    (tmp_path / "slow_package").mkdir()
    (tmp_path / "slow_package" / "__init__.py").write_text("value = 1\n")
    (tmp_path / "slow_package" / "part.py").write_text("from slow_package import value\n")
    monkeypatch.syspath_prepend(tmp_path)
    events = []

    @contextlib.contextmanager
    def context():
        events.append("begin")
        yield
        events.append(sys.modules["slow_package"].value)

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(lazy, "_contexts", {})
    monkeypatch.setattr(lazy, "_used", set())
    lazy.surround_import("slow_package", context)
    yield events
    for name in ("slow_package", "slow_package.part"):
        sys.modules.pop(name, None)


def test_a_package_is_imported_once_inside_its_context(events):
    part, package = lazy.LazyModule("slow_package.part"), lazy.LazyModule("slow_package")
    assert "slow_package" not in sys.modules and not events
    assert (part.value, package.value) == (1, 1)
    assert events == ["begin", 1]


def test_a_package_that_others_import_first_is_imported_inside_its_context(events):
    part = importlib.import_module("slow_package.part")
    assert part.value == 1 and events == ["begin", 1]
    assert lazy.LazyModule("slow_package").value == 1
    assert events == ["begin", 1]


def test_a_package_that_is_missing_stays_missing(events):
    lazy.surround_import("no_such_package", contextlib.nullcontext)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        importlib.import_module("no_such_package")


def test_an_unknown_attribute_raises_attribute_error():
    with pytest.raises(AttributeError, match="math"):
        lazy.LazyModule("math").cube_root  # noqa: B018


def test_a_private_module_that_is_gone_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow.python.gone", None)
    with pytest.raises(ImportError, match=r"no longer has its private tensorflow.python.gone.Op\."):
        lazy.PrivateModule("tensorflow.python.gone").Op  # noqa: B018
