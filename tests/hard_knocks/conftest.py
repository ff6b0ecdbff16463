"""The zygote that starts commands, and the trained runs that they damage."""

import pathlib

import pytest

from tests.hard_knocks import processes
from tests.hard_knocks.launch import Launch
from tests.hard_knocks.sandbox import Sandbox
from tests.tools.conftest import language_model_logdir, make_once, trained_logdir

__all__ = ["language_model_logdir", "trained_logdir"]

_FIXTURES = {
    "test.tiny": "tiny_logdir",
    "translation": "trained_logdir",
    "language model": "language_model_logdir",
}


@pytest.fixture(scope="session")
def zygote():
    """Returns the process that forks commands."""
    zygote = processes.Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def tiny_logdir(tmp_path_factory, zygote):
    """Returns the directory of test.tiny, trained for 12 steps."""

    def make(directory: pathlib.Path) -> None:
        command = "gshard-train --experiment=test.tiny --logdir=run"
        launch = Launch(
            processes.arguments_of(command, directory),
            str(directory),
            processes.environment(),
            ["/dev/null", "/dev/null", str(directory / "errors")],
            {},
        )
        assert zygote.wait(zygote.start(launch), 60) == 0, (directory / "errors").read_text()

    return make_once(tmp_path_factory, "tiny", make) / "run"


@pytest.fixture
def sandbox(tmp_path, request):
    """Returns the directory that a command runs in."""
    return Sandbox(tmp_path, lambda name: request.getfixturevalue(_FIXTURES[name]))
