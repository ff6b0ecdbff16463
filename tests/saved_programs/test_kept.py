"""Checks that a resumed run takes the step that it kept, and never one that may be another."""

import dataclasses
import io
import json
import os
import pathlib
import sys
import types

import pytest
import rich.console

from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.api.training import train
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.runtime import Program
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.wings.saved_programs import kept
from lingvo_gshard.wings.saved_programs.kept import ProgramKeeper
from tests import tiny

FACTS = {"params": "a = 1", "mesh": "data=1"}


def run(logdir: pathlib.Path, steps: int, keeps: bool, **options) -> None:
    params = tiny.experiment_params()
    params.run.keep_programs = keeps
    console = rich.console.Console(file=io.StringIO())
    given = RuntimeOptions(**{"runtime": "spmd", "mesh": "data=1", **options})
    # The schedule of the learning rate follows from the steps of the first start.
    params.run.steps = 6
    params.run.checkpoint_every_steps = 3
    train(params, logdir, steps=steps, options=given, console=console)


def arrays(logdir: pathlib.Path) -> dict[str, bytes]:
    checkpoint = CheckpointStore(logdir / "checkpoints", writable=False).restore()
    found = {**checkpoint.theta, **checkpoint.moments}
    return {path: array.tobytes() for path, array in found.items()}


def tracing(logdir: pathlib.Path) -> list[float]:
    """Returns the seconds that tracing each training step took."""
    rows = map(json.loads, (logdir / "compilations.jsonl").read_text().splitlines())
    return [row["tracing"] for row in rows if row["function"] == "train"]


def test_a_run_with_kept_programs_equals_one_without_to_the_bit(tmp_path):
    for name, keeps in (("with", True), ("without", False)):
        logdir = tmp_path / name
        run(logdir, 6, keeps)
        (first,) = tracing(logdir)
        assert first > 0
        # As after a failure: the same command, from an earlier checkpoint.
        newest = max((logdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
        os.rename(newest, logdir / "lost")
        run(logdir, 6, keeps)
        assert (tracing(logdir)[1] == 0) is keeps
        assert (logdir / "programs").exists() is keeps
    assert arrays(tmp_path / "with") == arrays(tmp_path / "without")


def test_other_params_trace_the_step_again(tmp_path):
    run(tmp_path, 6, keeps=True)
    run(tmp_path, 8, keeps=True)
    assert len(tracing(tmp_path)) == 2 and all(tracing(tmp_path))


@pytest.mark.parametrize("options", [{"runtime": "local", "mesh": None}])
def test_a_runtime_that_keeps_no_programs_is_refused(tmp_path, options):
    with pytest.raises(UserError, match="keep_programs=True needs `runtime=spmd`"):
        run(tmp_path, 6, keeps=True, **options)


class Making:
    """Makes a program, and counts how often."""

    def __init__(self, folder: pathlib.Path, facts: dict[str, str] = FACTS):
        self.keeper, self.count = ProgramKeeper(folder, facts), 0

    def get(self, kind: str = "train", key: object = ("x", (2, 3))) -> tuple[Program, list[str]]:
        return self.keeper.get(kind, key, self._make)

    def _make(self) -> tuple[Program, list[str]]:
        self.count += 1
        arrays = (Array("x", (2, 3), "float32", ((), ("data",))),)
        module = f"module {self.count}".encode()
        mesh = Mesh.parse("data=1")
        program = Program("step", module, arrays, arrays, (0,), mesh, tracing_seconds=1.0)
        return program, ["loss"]


def is_known(folder: pathlib.Path, facts: dict[str, str] = FACTS, **given) -> bool:
    """Returns whether another process finds a program."""
    making = Making(folder, facts)
    making.get(**given)
    return making.count == 0


def test_a_program_is_read_as_it_was_made(tmp_path):
    made, names = Making(tmp_path).get()
    program, found = Making(tmp_path).get()
    assert program == made and program.digest == made.digest and found == names
    assert program.tracing_seconds == 0


@pytest.mark.parametrize(
    "change",
    [
        {"facts": {**FACTS, "params": "a = 2"}},
        {"facts": {**FACTS, "mesh": "data=2"}},
        {"kind": "eval"},
        {"key": ("x", (2, 4))},
        {"key": ("y", (2, 3))},
    ],
)
def test_a_program_of_another_key_is_not_used(tmp_path, change):
    Making(tmp_path).get()
    assert is_known(tmp_path) and not is_known(tmp_path, **change)


def test_other_packages_sources_and_variables_are_another_key(tmp_path, monkeypatch):
    packages, sources = tmp_path / "installed", tmp_path / "package"
    (packages / "jax-1.0.dist-info").mkdir(parents=True)
    (sources / "core").mkdir(parents=True)
    (sources / "core" / "code.py").write_text("A = 1")
    monkeypatch.setattr(sys, "path", [str(packages)])
    monkeypatch.setattr(kept, "_PACKAGE", sources)
    folder = tmp_path / "programs"
    for change in (
        lambda: os.rename(packages / "jax-1.0.dist-info", packages / "jax-1.1.dist-info"),
        lambda: (sources / "core" / "code.py").write_text("A = 2"),
        lambda: (sources / "core" / "table.json").write_text("{}"),
        lambda: monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    ):
        Making(folder).get()
        assert is_known(folder)
        change()
        assert not is_known(folder)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "another:1")
    assert is_known(folder)


def test_a_changed_module_of_the_user_is_another_program(tmp_path, monkeypatch):
    source = tmp_path / "layers.py"
    source.write_text("A = 1")
    module = types.ModuleType("layers")
    module.__file__ = str(source)
    monkeypatch.setitem(sys.modules, "layers", module)
    Making(tmp_path / "programs").get()
    assert is_known(tmp_path / "programs")
    source.write_text("A = 2")
    assert not is_known(tmp_path / "programs")


@pytest.mark.parametrize("spoil", [lambda b: b[:-1], lambda b: b"", lambda b: b[:-9] + b[-8:]])
def test_a_damaged_file_is_made_again(tmp_path, spoil):
    Making(tmp_path).get()
    (path,) = tmp_path.iterdir()
    path.write_bytes(spoil(path.read_bytes()))
    assert not is_known(tmp_path) and is_known(tmp_path)


def test_a_file_under_another_name_is_not_used(tmp_path):
    Making(tmp_path).get()
    (train_file,) = tmp_path.iterdir()
    Making(tmp_path).get("eval")
    (other,) = set(tmp_path.iterdir()) - {train_file}
    other.write_bytes(train_file.read_bytes())
    assert is_known(tmp_path) and not is_known(tmp_path, kind="eval")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A function with fields, as those of routers are."""

    kinds: tuple[int, int]


def test_functions_are_told_apart_by_their_fields_and_others_are_not_kept(tmp_path):
    Making(tmp_path).get(key=("x", Measured((1, 2))))
    assert is_known(tmp_path, key=("x", Measured((1, 2))))
    assert not is_known(tmp_path, key=("x", Measured((1, 3))))
    Making(tmp_path).get(key=("x", lambda: None))
    assert not is_known(tmp_path, key=("x", lambda: None))


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "programs").write_text("a file")
    assert not is_known(tmp_path / "programs") and not is_known(tmp_path / "programs")
