"""Trains small models on synthetic text for tests of commands that read runs."""

import fcntl
import os
import pathlib
from collections.abc import Callable

import pytest

from lingvo_gshard.tools import train
from tests.tools import tiny_language_model, tiny_translation


def make_once(tmp_path_factory, name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns a directory that the first worker process to need it fills for all of them."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    directory, is_complete = root / name, root / f"{name}.complete"
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete.exists():
            directory.mkdir()
            make(directory)
            is_complete.touch()
    return directory


@pytest.fixture(scope="session")
def trained_logdir(tmp_path_factory):
    """Returns the directory of a small translation model, trained for a few steps.

    After training, a line of the dev split is damaged: it lacks a column.
    """

    def make(directory: pathlib.Path) -> None:
        arguments = tiny_translation.write(directory)
        train.main(["gshard-train", *arguments, f"--logdir={directory}/run", "--steps=20"])
        (directory / "dev.tsv").write_text("de\tHund\n", encoding="utf-8")

    return make_once(tmp_path_factory, "trained", make) / "run"


@pytest.fixture(scope="session")
def language_model_logdir(tmp_path_factory):
    """Returns the directory of a tiny language model, trained for some steps."""

    def make(directory: pathlib.Path) -> None:
        flags = tiny_language_model.write(directory)
        train.main(["gshard-train", *flags, f"--logdir={directory}/run", "--steps=30"])

    return make_once(tmp_path_factory, "language_model", make) / "run"


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory):
    """Keeps compiled programs and vocabularies out of the user's caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
