"""Tests what the command lines show of messages of libraries, and of libraries that are missing."""

import logging
import os
import resource
import sys
import sysconfig

import pytest

from lingvo_gshard.runtime import standard_error
from lingvo_gshard.tools.console import libraries

LIBRARY = os.path.join(sysconfig.get_path("purelib"), "jax", "file.py")


@pytest.fixture
def messages():
    standard_error.hidden.clear()
    return libraries.Messages()


def record(text: str, path: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("name", level, path, 182, text, (), None)


def test_a_warning_of_ours_is_one_plain_line_and_shown_once(messages, capsys):
    path = libraries.__file__
    for text in ("6 rows are left out", "6 rows are left out", "7 rows are left out"):
        messages.handle(record(text, path))
    messages.handle(record("the disk is full", path, logging.ERROR))
    assert capsys.readouterr().err == (
        "Warning: 6 rows are left out\nWarning: 7 rows are left out\nError: the disk is full\n"
    )


def test_a_users_module_warns_like_the_package(messages, capsys, tmp_path):
    messages.handle(record("odd row", str(tmp_path / "my_reader.py")))
    messages.show_warning(UserWarning("odd file"), UserWarning, str(tmp_path / "my_reader.py"), 3)
    assert capsys.readouterr().err == "Warning: odd row\nWarning: odd file\n"


def test_messages_of_libraries_are_hidden_and_kept(messages, capsys):
    messages.handle(record("Unable to initialize backend 'tpu'", LIBRARY))
    messages.show_warning(DeprecationWarning("old"), DeprecationWarning, LIBRARY, 3)
    assert capsys.readouterr().err == ""
    assert list(standard_error.hidden) == [
        f"{LIBRARY}: Unable to initialize backend 'tpu'",
        f"{LIBRARY}: old",
    ]


def test_native_messages_are_hidden_kept_and_shown_on_an_error(capfd, monkeypatch):
    standard_error.hidden.clear()
    with standard_error.hide():
        os.write(2, b"failed call to cuInit\n")
    assert capfd.readouterr().err == ""
    assert list(standard_error.hidden) == ["failed call to cuInit"]
    with pytest.raises(RuntimeError), standard_error.hide():
        os.write(2, b"no device\n")
        raise RuntimeError
    assert capfd.readouterr().err == "no device\n"
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    with standard_error.hide():
        os.write(2, b"I device 0\n")
    assert capfd.readouterr().err == "I device 0\n"


@pytest.mark.parametrize(
    "module, package",
    [
        ("sentencepiece", "sentencepiece"),
        ("orbax.checkpoint", "orbax-checkpoint"),
        ("gin", "gin-config"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(module, package):
    advice = libraries.advice_for_missing(ModuleNotFoundError(name=module))
    assert advice.startswith(f"the package {package} is missing. To install it: {sys.executable} ")
    command = advice.partition(": ")[2].split()
    # A clone: pip installs the clone, in the versions that were tested.
    assert command[1:5] == ["-m", "pip", "install", "-c"] and command[6] == "-e"
    assert os.path.exists(command[5]) and os.path.exists(os.path.join(command[7], "setup.py"))


def test_every_requirement_has_a_known_package():
    requirements = libraries.requirements()
    assert {"absl-py", "jax", "tensorflow", "msgspec"} <= requirements.keys()
    assert "libtpu" not in requirements
    named = set(libraries._DISTRIBUTIONS.values()) - {"protobuf"}
    assert named <= requirements.keys()


def test_a_module_of_the_users_that_is_missing_is_named(tmp_path, monkeypatch):
    (tmp_path / "my_experiments.py").write_text("\nimport not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as caught:
        import my_experiments  # noqa: F401
    advice = libraries.advice_for_missing(caught.value)
    assert advice == (
        f"there is no module 'not_there', which {tmp_path / 'my_experiments.py'}:2 imports"
    )
    assert libraries.advice_for_missing(ModuleNotFoundError(name="lingvo_gshard.gone")) is None


@pytest.mark.parametrize("gib, refused", [(2, True), (6, False)])
def test_a_limit_on_virtual_memory_is_refused_or_warned_of(gib, refused, monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (gib * 2**30, resource.RLIM_INFINITY))
    if refused:
        with pytest.raises(ValueError, match=r"limited to 2\.0 GiB \(ulimit -v\)\. .* at least 4"):
            libraries.check_limits()
    else:
        libraries.check_limits()
        assert "limited to 6.0 GiB" in caplog.text
