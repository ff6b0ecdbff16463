# tests: tools/, tools/console/startup.py, tools/console/subcommands.py
"""Tests the help of all commands: lines of 80 columns, and examples whose flags exist."""

import importlib
import re
import shlex
from collections.abc import Iterator, Mapping

import pytest

from lingvo_gshard.tools.console import launcher, startup
from tests.tools.command_lines import check, commands_in


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
        if re.search(r"(^|[|(] *)\s*gshard-", line):
            yield from commands_in(line)


@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_help_has_80_columns_and_examples_whose_flags_exist(command, capsys, monkeypatch):
    text = _help(command, capsys, monkeypatch)
    assert not [line for line in text.splitlines() if len(line) > 80]
    for words in _examples(text):
        check(words)
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
        check(["gshard-train", "--stps=3"])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("echo a | gshard-translate --logdir=a > b.txt", [["gshard-translate", "--logdir=a"]]),
        ("for s in 1 2; do gshard-train --seed=$s; done", [["gshard-train", "--seed=$s"]]),
        (
            "gshard-launch local --workers=2 -- gshard-train --logdir='a b'  # Why.",
            [["gshard-launch", "local", "--workers=2", "--"], ["gshard-train", "--logdir=a b"]],
        ),
        ("source <(.venv/bin/gshard-completion bash)", [["gshard-completion", "bash"]]),
        ("cat gshard-train.txt", []),
    ],
)
def test_commands_are_found_in_a_line(line, found):
    assert list(commands_in(line)) == found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gshard-train --experiment=translation.quikstart", "translation.quickstart"),
        ("gshard-train --experiment=translation.quickstart --steps=0", "steps"),
        ("gshard-plan --experiment=translation.quickstart --step.clp_norm=1", "step.clip_norm"),
        ("gshard-plan --topology=v9:1x1", "v9"),
        ("gshard-bench stp", "no such subcommand"),
        ("gshard-train --logdr=DIRECTORY", "no flag --logdr"),
    ],
)
def test_a_wrong_name_or_value_of_an_example_is_found(line, message):
    (words,) = commands_in(line)
    with pytest.raises((ValueError, AssertionError), match=message):
        check(words)
