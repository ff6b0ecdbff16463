# tests: tools/, tools/console/startup.py, tools/console/subcommands.py
"""Tests the help of all commands: lines of 80 columns, and examples whose flags exist."""

import importlib
import re
import shlex
from collections.abc import Iterator, Mapping

import pytest

from lingvo_gshard.tools.console import launcher, startup

_REDIRECTION = re.compile(r"[0-9]?[<>]\S*")


def _module(tool: str):
    return importlib.import_module(f"lingvo_gshard.tools.{tool}")


def _commands() -> list[tuple[str, ...]]:
    found = []
    for tool in launcher.tool_names():
        subcommands = getattr(_module(tool), "SUBCOMMANDS", {})
        names = subcommands if isinstance(subcommands, Mapping) else {}
        found += [(tool,), *((tool, name) for name in names)]
    return found


def _help(command: tuple[str, ...], capsys, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    try:
        _module(command[0]).main([f"gshard-{command[0]}", *command[1:], "--help"])
    except SystemExit as end:
        assert not end.code
    return capsys.readouterr().out


def _examples(text: str) -> Iterator[list[str]]:
    """Yields the words of each command of this package in the indented lines of a help."""
    for line in re.findall(r"^ {4}\S.*", text.replace("\\\n", " "), re.MULTILINE):
        if not re.search(r"(^|[|(] *)\s*gshard-", line):
            continue
        for part in re.split(r" \| |<\(|\)$", line):
            words = shlex.split(part, comments=True)
            while words and words[0].startswith("gshard-"):
                end = words.index("--") if "--" in words else len(words)
                yield words[:end]
                words = words[end + 1 :]


def _check(words: list[str]) -> None:
    """Raises an error if a command does not have the flags of an example."""
    module = _module(words[0].removeprefix("gshard-"))
    arguments: list[str] = []
    for word in words[1:]:
        if _REDIRECTION.fullmatch(word):
            break
        arguments.append(word)
    subcommands = getattr(module, "SUBCOMMANDS", {})
    if subcommands and not (arguments and arguments[0].startswith("--")):
        assert arguments[0] in subcommands, words
        if isinstance(subcommands, Mapping):
            module = importlib.import_module(subcommands[arguments[0]])
    flags = [a for a in arguments if a.startswith("--") and a != "--help"]
    startup.parse_flags(module.define_flags(), [words[0], *flags], None)


@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_help_has_80_columns_and_examples_whose_flags_exist(command, capsys, monkeypatch):
    text = _help(command, capsys, monkeypatch)
    assert not [line for line in text.splitlines() if len(line) > 80]
    for words in _examples(text):
        _check(words)
    assert len(command) > 1 or any(_examples(text)), "the help has no example"


def test_a_long_command_is_continued_and_quotes_stay_whole():
    command = "    gshard-train --first=1 --gin_param='step.clip_norm = 1.0' --last"
    folded = startup.refilled(command, 50).splitlines()
    assert folded == [
        "    gshard-train --first=1 \\",
        "        --gin_param='step.clip_norm = 1.0' --last",
    ]
    assert shlex.split(" ".join(folded).replace("\\ ", "")) == shlex.split(command)


def test_a_wrong_example_is_found():
    with pytest.raises(ValueError, match="Unknown command line flag 'stps'"):
        _check(["gshard-train", "--stps=3"])
