# tests: core/config/params_text.py, core/config/registry.py
"""The params.txt of a stranger names classes and functions of trusted modules, and no others."""

import sys
import time

import pytest

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params_text import experiment_from_text
from lingvo_gshard.core.errors import UserError

OBJECTS = "lingvo_gshard.core.files.objects"
REGISTRY = "lingvo_gshard.core.config.registry"


def value(text: str):
    return experiment_from_text(f"task : {text}\n").task


@pytest.mark.parametrize(
    "name",
    [
        f"{OBJECTS}.shutil.rmtree",
        f"{OBJECTS}.shutil",
        f"{OBJECTS}.os.system",
        f"{OBJECTS}.BinaryIO",
        # Imported by name, so that it belongs to another module of the package.
        f"{OBJECTS}.write_atomically",
        f"{OBJECTS}.Entry.__class__",
        f"{OBJECTS}.Entry.__class__.__subclasses__",
        f"{OBJECTS}.read_bytes.__globals__",
        f"{OBJECTS}.__builtins__.eval",
        f"{OBJECTS}.__loader__.exec_module",
        f"{OBJECTS}._BLOCK_BYTES",
        f"{OBJECTS}.nothing",
        f"{REGISTRY}.Experiment.nothing",
        "lingvo_gshard.core.lazy.tf.io.gfile.rmtree",
        "lingvo_gshard.training",
        "numpy.os.system",
        "pytest.nothing",
    ],
)
def test_names_that_a_module_does_not_define_are_refused(name):
    with pytest.raises(UserError, match="line 1: task: .*defines no class or function|imported"):
        value(name)


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "subprocess.run", "nowhere.f"])
def test_modules_that_are_not_trusted_are_refused(name, monkeypatch):
    # Other tests of the process may have named Python's modules.
    monkeypatch.setattr(registry, "_named", set())
    with pytest.raises(UserError, match="code of its own. If you trust it"):
        value(name)


def test_what_a_module_defines_is_found():
    assert value(f"{REGISTRY}.Experiment") is registry.Experiment
    assert value(f"{REGISTRY}.Experiment.params").__func__ is registry.Experiment.params.__func__
    assert value(f"{REGISTRY}.names") is registry.names


def test_a_file_imports_nothing(tmp_path, monkeypatch):
    """Modules below a module of the user count when the user has named it, or imported them."""
    folder = tmp_path / "package_of_mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("class Mine: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_named", set())
    name = "package_of_mine.inner.Mine"
    with pytest.raises(UserError, match="add `import=package_of_mine`"):
        value(name)
    __import__("package_of_mine")
    with pytest.raises(UserError, match="not yet imported need `import=package_of_mine`"):
        value(name)
    assert "package_of_mine.inner" not in sys.modules
    registry.import_module("package_of_mine")
    assert value(name) is sys.modules["package_of_mine.inner"].Mine
    for module in ("package_of_mine", "package_of_mine.inner"):
        sys.modules.pop(module)


@pytest.mark.parametrize(
    "line",
    [
        "task : " + "-" * 3_000 + "1",
        "task : " + "-" * 300_000 + "1",
        "task : " + "[" * 20_000,
        "task : " + "{" * 90 + "}" * 90,
        "task : 1" + "+1" * 5_000 + "j",
        "task" + "[0]" * 5_000 + ".cls : 3",
        "task[999999999].cls : lingvo_gshard.core.config.registry.Experiment",
        "task[" + "9" * 5_000 + "].cls : 3",
        "task.cls : 3",
        f"task.cls : {REGISTRY}.names",
        "task.cls : lingvo_gshard.core.errors.UserError",
        "task.cls.params : 3",
        f"task : {OBJECTS}" + ".a" * 3_000,
    ],
    ids=lambda line: line[:24],
)
def test_wild_lines_are_refused_at_once(line):
    began = time.monotonic()
    with pytest.raises(UserError, match="^line 1: "):
        experiment_from_text(f"{line}\n")
    assert time.monotonic() - began < 5


def test_the_elements_of_a_tuple_are_refused():
    with pytest.raises(UserError, match="tuple cannot be set one by one"):
        experiment_from_text("sharding.compile_options : (1, 2)\nsharding.compile_options[0] : 3\n")
