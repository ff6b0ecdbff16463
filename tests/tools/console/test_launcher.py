# tests: tools/console/launcher.py, tools/console/entry.py, tools/console/process_start.py
"""Tests `python -m lingvo_gshard` and the entry point of every command."""

import importlib.util
import json
import pathlib
import shlex
import subprocess
import sys

import pytest

import lingvo_gshard
from lingvo_gshard.tools.console import launcher

ROOT = pathlib.Path(__file__).resolve().parents[3]
HIDE_LIBRARIES = """
import sys
sys.modules.update(dict.fromkeys(("tensorflow", "jax", "orbax", "scipy")))
"""
WITHOUT_LIBRARIES = f"""{HIDE_LIBRARIES}
from lingvo_gshard.tools.console import launcher
sys.argv = {{argv}}
launcher.{{entry}}()
"""
RUN_EACH = f"""{HIDE_LIBRARIES}
import contextlib, io, json, shlex
from lingvo_gshard.tools.console import launcher
answers = {{{{}}}}
for command in {{commands}}:
    sys.argv = shlex.split(command)
    output, error, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            launcher.run_script()
        except SystemExit as exit:
            code = exit.code or 0
    answers[command] = code, output.getvalue(), error.getvalue()
print(json.dumps(answers))
"""
_QUICKSTART = "gshard-train --experiment=translation.quickstart --logdir=nowhere"
# Command lines that are answered without TensorFlow -> part of the answer.
ANSWERS = {
    **dict.fromkeys(f"gshard-{tool} --help" for tool in launcher.tool_names()),
    "gshard-train --list --json": '"translation.quickstart": "Ten related languages',
    "gshard-plan --list_topologies --json": '"topology": "v3:32x32"',
    "gshard-train --list": "translation.quickstart\n    Ten related languages to English",
    "gshard-plan --list_topologies": "v3",
    "gshard-train": "--experiment is missing",
    "gshard-train --experimnt=x": "Did you mean: experiment",
    "gshard-train --steps=ten": "--steps=ten",
    "gshard-train --step=10": "Did you mean: steps ?\n",
    "gshard-train --experiment=translation.quickstrt": "Did you mean 'translation.quickstart'?",
    "gshard-train --experiment=translation.quickstart": "--logdir is missing",
    "gshard-train --experiment=translation.quickstart --gin_param=task.model_dimm=1": (
        "Did you mean 'task.model_dim'?"
    ),
    f"{_QUICKSTART} --input.batch_rows=x": "expected int, such as 24; got the string 'x'",
    f"{_QUICKSTART} --batch_size=8": "Did you mean '--input.batch_rows'?",
    f"{_QUICKSTART} --strategy=tensr": "unknown strategy 'tensr'. Did you mean 'tensor'?",
    f"{_QUICKSTART} --mesh=data=2 --strategy=expert_tensr": "Did you mean 'tensor'?",
    f"{_QUICKSTART} --mesh=data=2 --strategy=tensor": "needs axis 'model'",
    f"{_QUICKSTART} --mesh=data": "expected axes with their sizes",
    f"{_QUICKSTART} --step.precision=fp16": "step.precision is 'fp16'. Did you mean 'float16'?",
    f"{_QUICKSTART} --task.encoder.num_heads=5": "5",
    f"{_QUICKSTART} --input.languages='(\"jp\",)'": "the corpus has no 'jp'. Valid: af, ar,",
    f"{_QUICKSTART} --input.languages='(\"ja_JP\",)'": "the corpus has no 'ja_JP'",
    f"{_QUICKSTART} --gin_param='clip_norm = 1.0x'": "text follows the value; expected float",
    "gshard-inspect --experiment=language_model.quickstrt": "Did you mean",
    "gshard-inspect --experiment=language_model.quickstart": "--mesh is missing",
    "gshard-plan --experiment=translation.quickstart --topology=v9:2x2": "unknown kind of chip",
    "gshard-translate": "--logdir is missing",
    "gshard-generate --logdir=nowhere": "there is no such directory",
    "gshard-evaluate --logdir=nowhere": "there is no such directory",
    "gshard-experts reprt": "Did you mean 'report'?",
    "gshard-bench stp": "Did you mean 'step'?",
}


def run(entry: str, *argv: str) -> subprocess.CompletedProcess:
    """Runs an entry point in a subprocess without TensorFlow and jax."""
    code = WITHOUT_LIBRARIES.format(argv=list(argv), entry=entry)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("tool", ["train", "plan"])
def test_a_command_prints_its_version(tool):
    result = run("run_script", f"/usr/bin/gshard-{tool}", "--version")
    assert result.stdout == f"gshard-{tool} {lingvo_gshard.__version__}\n", result.stderr


def test_the_package_prints_its_version():
    result = run("run_module", "__main__.py", "--version")
    assert result.stdout == f"lingvo_gshard {lingvo_gshard.__version__}\n", result.stderr


def test_the_package_lists_its_commands():
    result = run("run_module", "__main__.py")
    assert result.returncode == 0, result.stderr
    for tool in launcher.tool_names():
        assert f"  gshard-{tool} " in result.stdout


def test_unknown_command_suggests_the_nearest():
    result = run("run_module", "__main__.py", "trian")
    assert result.returncode == 1
    assert result.stderr == (
        "lingvo_gshard: error: unknown command 'trian'. Did you mean 'train'?\n"
    )


@pytest.fixture(scope="module")
def answers():
    """Returns command line -> (exit code, standard output, standard error), without TensorFlow."""
    code = RUN_EACH.format(commands=list(ANSWERS))
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("tool", ["train", "plan"])
def test_json_of_a_list_is_alone_on_standard_output(tool, answers):
    listed = {"train": "--list", "plan": "--list_topologies"}[tool]
    code, output, _ = answers[f"gshard-{tool} {listed} --json"]
    _, text, _ = answers[f"gshard-{tool} {listed}"]
    names = [row["topology"] if tool == "plan" else row for row in json.loads(output)]
    assert code == 0 and len(names) > 5
    assert all(name in text for name in names)


@pytest.mark.parametrize(
    "tool",
    sorted(
        {*launcher.tool_names()}
        - {"translate", "bench", "checkpoints", "completion", "experts", "launch", "serve"}
    ),
)
def test_commands_with_results_have_json(tool, answers):
    _, output, _ = answers[f"gshard-{tool} --help"]
    assert "--json=JSON" in output


@pytest.mark.parametrize("tool", launcher.tool_names())
def test_help_needs_no_tensorflow(tool, answers):
    code, output, error = answers[f"gshard-{tool} --help"]
    assert (code, error) == (0, "")
    assert f"    gshard-{tool} " in output, "the help has no example"


def test_every_page_of_help_belongs_to_a_command():
    pages = list((ROOT / "lingvo_gshard" / "tools" / "help").glob("*.txt"))
    names = [f"lingvo_gshard.tools.{page.stem}" for page in pages]
    assert pages and all(map(importlib.util.find_spec, names)), names


@pytest.mark.parametrize("command", [c for c, expected in ANSWERS.items() if expected])
def test_lists_and_mistakes_need_no_tensorflow(command, answers):
    code, output, error = answers[command]
    assert ANSWERS[command] in (error if code else output)
    assert code == ("--list" not in command)
    assert not code or error.count("\n") == 1


def run_shell(command: str) -> subprocess.CompletedProcess:
    """Runs `python -m lingvo_gshard` in a shell, with redirections."""
    line = f"{shlex.quote(sys.executable)} -m lingvo_gshard {command}"
    return subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "command, error",
    [
        ("translate --logdir=x <&-", "gshard-translate: error: standard input is closed;"),
        ("train --list >&-", "gshard-train: error: standard output is closed."),
        ("train --list >/dev/full", "gshard-train: error: standard output cannot be written: No s"),
        ("train --list 2>&- | cat; exit ${PIPESTATUS[0]}", None),
    ],
)
def test_closed_and_full_standard_streams_get_a_sentence(command, error):
    result = run_shell(command)
    if error is None:
        assert result.returncode == 0 and "translation.quickstart" in result.stdout
    else:
        assert result.returncode == 1
        assert result.stderr.startswith(error) and result.stderr.count("\n") == 1


def test_the_end_of_a_pipe_is_silent():
    result = run_shell("train --help | true; exit ${PIPESTATUS[0]}")
    assert result.returncode in (0, 1, 141) and result.stderr == ""
