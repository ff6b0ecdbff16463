# tests: tools/console/shells.py, tools/completion.py
"""Completes command lines in real shells."""

import os
import pty
import select
import shutil
import subprocess
import time

import pytest

from lingvo_gshard.tools import completion
from lingvo_gshard.tools.console import launcher, shells

_SECONDS = 30


@pytest.fixture(scope="module")
def commands():
    return completion.commands()


@pytest.fixture
def script(commands, tmp_path):
    """Returns a function that writes a shell's script and returns its path."""

    def write(shell):
        path = tmp_path / f"gshard.{shell}"
        path.write_text(shells.SCRIPTS[shell](commands), encoding="utf-8")
        return path

    return write


def typed_in_terminal(command, lines, folder):
    """Types lines into a shell on a terminal; returns all that it shows.

    Each line is typed when the shell has shown nothing more for a while.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "> "})
    shown = b""
    try:
        for line in [*lines, "exit\n"]:
            while select.select([terminal], [], [], 0.5)[0]:
                shown += os.read(terminal, 4096)
            os.write(terminal, line.encode())
        limit = time.monotonic() + _SECONDS
        while time.monotonic() < limit:
            try:
                shown += os.read(terminal, 4096)
            except OSError:
                break
    finally:
        os.close(terminal)
        os.waitpid(child, 0)
    return shown.decode()


def test_every_command_is_completed(commands):
    names = {command.name for command in commands}
    assert names == {f"gshard-{tool}" for tool in launcher.tool_names()}
    for command in commands:
        for flags in command.flags.values():
            assert {"help", "version", "import"} <= {flag.name for flag in flags}
    found = {command.name: command.subcommands.split() for command in commands}
    assert found["gshard-checkpoints"] == ["list", "verify", "prune", "copy"]
    assert found["gshard-train"] == []


def test_bash_completes_as_one_types(script, tmp_path):
    (tmp_path / "settings.gin").touch()
    path = script("bash")
    # Each line ends with what is kept of it: an echo that shows the completed words.
    shown = typed_in_terminal(
        ["bash", "--norc", "--noprofile", "-i"],
        [
            f"source {path}\n",
            'gshard-train() { echo "[$*]"; }; gshard-checkpoints() { echo "[$*]"; }\n',
            "gshard-train --init\trun --gin_f\tsett\t --experiment=translation.quickstart_d\t\n",
            "gshard-checkpoints ver\t--logd\trun\n",
            "gshard-plan --li\t",
            "\x15",
        ],
        tmp_path,
    )
    assert "[--init_from=run --gin_file=settings.gin --experiment=translation.quickstart_dense" in (
        shown
    )
    assert "[verify --logdir=run]" in shown
    assert "gshard-plan --list" in shown


def test_what_bash_offers(script):
    cases = {
        "gshard-train --log": "--logdir=",
        "gshard-train --strategy = fs": "fsdp",
        "/usr/bin/gshard-train --strategy=fs": "--strategy=fsdp",
        "gshard-plan --search_for =": "time cost",
        "gshard-plan --topology = v5p": "v5p:8x8x8",
        "gshard-checkpoints ''": "list verify prune copy",
        "gshard-checkpoints list --k": "",
        "gshard-checkpoints prune --k": "--keep=",
        "gshard-bench step --rep": "--repeats=",
        "gshard-completion z": "zsh",
        "gshard-train --steps = 1": "",
    }
    # As readline calls the function, with the words before the cursor; = is a word of its own.
    program = f"compopt() {{ :; }}; source '{script('bash')}'"
    for line in cases:
        program += f"\nCOMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _gshard"
        program += '\necho "${COMPREPLY[*]}"'
    found = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert found.stderr == ""
    assert found.stdout.splitlines() == list(cases.values())


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_as_one_types(script, tmp_path):
    shown = typed_in_terminal(
        ["zsh", "-f", "-i"],
        [
            f"autoload -U compinit; compinit -u -d {tmp_path}/dump; source {script('zsh')}\n",
            'gshard-train() { echo "[$*]" }; gshard-checkpoints() { echo "[$*]" }\n',
            "gshard-train --init\trun --strategy=fs\t\n",
            "gshard-checkpoints ver\t--logd\trun\n",
        ],
        tmp_path,
    )
    assert "[--init_from=run --strategy=fsdp" in shown
    assert "[verify --logdir=run]" in shown


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_what_fish_offers(script):
    cases = {
        "gshard-train --init": "--init_from",
        "gshard-train --strategy=fs": "--strategy=fsdp",
        "gshard-checkpoints ver": "verify",
        "gshard-checkpoints prune --ke": "--keep",
    }
    for line, offered in cases.items():
        program = f"source {script('fish')}; complete -C '{line}'"
        found = subprocess.run(
            ["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True
        )
        words = [each.partition("\t")[0].removesuffix("=") for each in found.stdout.splitlines()]
        assert words == [offered]
