# tests: /docs/, /README.md
"""Runs every command in README.md and docs/, or names the test that covers it.

A page's `bash` and `console` blocks (in the latter, the lines after `$ `) are run in order in one
empty folder, as a reader would, except that commands in TINY get flags that make them small.
"""

import ast
import inspect
import os
import pathlib
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest

import lingvo_gshard as gshard
from lingvo_gshard.api.run import Run
from lingvo_gshard.tools.console.launcher import tool_names
from lingvo_gshard.tools.experts import report
from tests.open_models import published
from tests.tools import command_lines

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/*.md")])

# Words of all PAGES, as `wc -w` counts them. Nobody finds an answer in pages that only grow.
MOST_WORDS = 65_000

# Pages whose commands other tests run, if any does. Here their flags are checked.
OTHER_PAGES = sorted([ROOT / "CONTRIBUTING.md", *ROOT.glob("examples/**/README.md")])

_SMALL_MODEL = [
    "--gin_param=task.model_dim = 16",
    "--gin_param=task.encoder.num_layers = 1",
    "--gin_param=task.encoder.moe_every = 1",
    "--gin_param=task.decoder.num_layers = 1",
]

# The languages that pages name, and a vocabulary that is trained quickly.
_LITTLE_TEXT = [
    "--gin_param=input.languages = ('de', 'es', 'gl', 'nl', 'pt')",
    "--gin_param=input.vocabulary.size = 1000",
]

_SMALL_DENSE_MODEL = [
    "--gin_param=task.model_dim = 16",
    "--gin_param=task.encoder.num_layers = 1",
    "--gin_param=task.decoder.num_layers = 1",
]

_SMALL_LANGUAGE_MODEL = [
    "--gin_param=task.model_dim = 16",
    "--gin_param=task.decoder.num_layers = 1",
    "--gin_param=task.decoder.moe_every = 1",
]

# Patterns of commands, and flags that make them fast.
TINY = {
    "gshard-train --experiment=translation.quickstart": [*_SMALL_MODEL, *_LITTLE_TEXT],
    "gshard-train --experiment=translation.quickstart_dense": [*_SMALL_MODEL, *_LITTLE_TEXT],
    "gshard-train --experiment=translation.from_files": _SMALL_MODEL,
    "gshard-train --experiment=translation.large": [
        *_SMALL_MODEL,
        "--gin_param=task.encoder.num_heads = 2",
        "--gin_param=task.decoder.num_heads = 2",
    ],
    "gshard-train --experiment=starved.experiment": [*_SMALL_MODEL, *_LITTLE_TEXT],
    "gshard-train --experiment=language_model.quickstart(?! --logdir=runs/wide)": (
        _SMALL_LANGUAGE_MODEL
    ),
    # Its widths are what the command is about.
    "gshard-train --experiment=language_model.quickstart --logdir=runs/wide": (
        _SMALL_LANGUAGE_MODEL[1:]
    ),
    "gshard-train --experiment=language_model.from_files": _SMALL_LANGUAGE_MODEL,
    r"gshard-train --experiment=(?:broken_inputs\.\w+|unsteady\.experiment)": [
        *_SMALL_MODEL,
        *_LITTLE_TEXT,
    ],
    # A single layer has experts in the encoder and, unless every layer has, none in the decoder.
    "gshard-train --experiment=collapsed.experiment": [
        *_SMALL_MODEL,
        *_LITTLE_TEXT,
        "--gin_param=task.decoder.moe_every = 1",
    ],
    # A step is replayed with the Params of its run.
    r"gshard-train(?! .*--replay_step)": ["--steps=2"],
    "gshard-plan --experiment=language_model.quickstart --topology=cpu:1": _SMALL_LANGUAGE_MODEL,
    "gshard-evaluate --logdir=runs/quickstart": ["--languages=gl", "--beam_size=1"],
    "gshard-bench exported": ["--repeats=1", "--gemm_size=64"],
    "gshard-plan --experiment=translation.quickstart": [*_SMALL_MODEL, *_LITTLE_TEXT],
    r"gshard-\w+ --experiment=(?:time_major|gathering|gated|partial)\.experiment": [
        *_LITTLE_TEXT,
        *_SMALL_DENSE_MODEL,
    ],
    r"gshard-verify --experiment=(?:translation\.quickstart|broken\.experiment)": [
        *_SMALL_MODEL,
        "--gin_param=input.vocabulary.size = 64",
        "--gin_param=input.batch_rows = 8",
    ],
}

# Commands that are not run here, and the test file that covers them.
ELSEWHERE = {
    r"git clone .*": ".ci/run",
    r"cd [\w.-]+": ".ci/run",
    r"python3?(\.11)? -m venv [\w./-]+": ".ci/run",
    r"(source|\.) [\w./-]+/bin/activate": ".ci/run",
    r"([\w./-]+/)?pip install .*": ".ci/run",
    r"make (quickstart|install|lint|test|test-all|bazel-test|help)": "tests/test_makefile.py",
    r"make pictures": "tests/test_pictures.py",
    r"python hosts\.py .*": "tests/keras/test_hosts.py",
    r"python -m docs\.pictures .*": "tests/test_pictures.py",
    r"python -m docs\.planned\.published .*": "tests/test_published.py",
    r"gshard-serve .*": "tests/serving/test_process.py",
    r"curl localhost:8000/.*": "tests/serving/test_translate.py",
    r"tensorboard .*": "tests/training",
    r"gshard-train .* --writer=.*": "tests/services/test_trackers.py",
    # These need a bucket.
    r".*(?:gs|s3)://my-bucket/.*": "tests/object_stores/test_page.py",
    # These need files of other libraries.
    r"gshard-train .* --init_from=ckpt-.*": "tests/open_models/test_lingvo.py",
    r"gshard-prepare --output=books .*": "tests/preparation/formats/test_megatron.py",
    r"gshard-prepare --output=from_\w+ .*": "tests/preparation/formats/test_examples.py",
    # These need a published model, or transformers.
    r"gshard-import .*": "tests/tools/test_import.py",
    r".*gshard-\w+ .*--logdir=runs/(llama|tuned|norms).*": "tests/tools/test_import.py",
    r".*gshard-\w+ .*--logdir=runs/m2m.*": "tests/open_models/translation/test_m2m_100.py",
    r"gshard-plan --config=.*": "tests/tools/test_import.py",
    r"gshard-plan --serve": "tests/serving/planning/test_planning_page.py",
    r"gshard-bench step .*--profile=.*": "tests/tools/test_bench.py",
    # It takes minutes on CPUs.
    r"gshard-doctor --accelerator": "tests/tools/diagnosis/test_accelerator.py",
    # These need a GPU.
    r"gshard-bench fill .*--topology=gpu.*": "tests/tools/benchmarks/card/test_fill.py",
    r"bench/bin/gshard-bench card .*": "tests/tools/benchmarks/card/test_measure.py",
    r"export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95": "tests/tools/benchmarks/card/test_measure.py",
    r"python -m benchmarks (parity|decode|input) .*": "tests/benchmarks/test_command.py",
    r"python -m benchmarks moe .*": "tests/benchmarks/test_moe.py",
    r"python -m studies paper( --[\w=./,-]+)*": "tests/studies/paper/test_command.py",
    r"python -m studies experts .*": "tests/studies/test_experts.py",
    r"python -m studies recipes .*": "tests/studies/test_recipes.py",
    r"python -m studies widths .*": "tests/studies/test_widths.py",
    # These need a TPU. The files test the parts that do not.
    r"gshard-train .* --logdir=runs/tpu --runtime=spmd": "tests/runtime/test_ahead_of_time.py",
    r"TPU_LIBRARY_PATH=.* gshard-train .* --tpu=local": "tests/tools/flags/test_tpu_flags.py",
}

# Commands in blocks that are neither `bash` nor `console`, and why no test runs them. The flags and
# values of this package's commands among them are checked.
NEVER_RUN = {
    r"(docker|kubectl|gcloud|ray|sky) .*": "needs a daemon, a cluster or an account",
    r"gshard-launch .*": "needs a cluster",
    r"gshard-prepare .* --beam=.*": "needs a cluster of Beam's",
    r"(apt-get|studies/texts/fetch_\w+\.sh) .*": "fetches text of others",
    r"gshard-prepare .*(bench\.|from_english\.|documentation/|catalogs/).*": "needs that text",
    r"python -m (studies|benchmarks) .*": "takes hours; their tests run small ones",
    r"nohup nice python -m studies .*": "takes hours; tests/studies runs it",
    r"python -m docs\.pictures .*": "needs the file that a study of hours writes",
    r"gshard-train --experiment=translation\.large --logdir=runs/large .*": "takes hours",
    r"gshard-(evaluate|experts report) --logdir=runs/large .*": "needs the run of hours",
    r"gshard-train .* --gin_file=adam\.gin .*": "needs files that its page describes",
    r"gshard-\w+ .* --kernels=tpu.*": "takes minutes; tests/kernels verify smaller ones",
    r"%?pip .*": "needs a network, or the wheels of another machine",
    r"xprof .*": "needs a package of its own, and serves until it is stopped",
}

# Pages whose commands run with a small model at the path of the published one that they name.
WITH_A_PUBLISHED_MODEL = {"fine_tuning.md": "models/Llama-3.2-1B"}

SLOW_PAGES = (
    "README.md",
    "accelerators.md",
    "clusters.md",
    "data.md",
    "debugging.md",
    "decoding.md",
    "experts.md",
    "extending.md",
    "fine_tuning.md",
    "install.md",
    "language_model.md",
    "memory_and_communication.md",
    "moe.md",
    "pipelines_and_long_inputs.md",
    "planning.md",
    "profiling.md",
    "programs.md",
    "runs.md",
    "strategies.md",
    "training.md",
    "trust.md",
)

NEEDS_LIBTPU = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")

# Pages whose `python` blocks form one script, but for those that are files. A `text` block shows
# the output of the block before.
SCRIPTS = (
    # It trains seven times. tests/keras has a fast test of each part.
    pytest.param("docs/keras.md", marks=pytest.mark.slow),
    "docs/your_own_layer.md",
    pytest.param("docs/accelerators.md", marks=[pytest.mark.slow, NEEDS_LIBTPU]),
    pytest.param("docs/planning.md", marks=pytest.mark.slow),
    pytest.param("docs/data.md", marks=pytest.mark.slow),
    pytest.param("docs/programs.md", marks=pytest.mark.slow),
    # It trains and loads twice. tests/api/test_run.py has a fast test of each call.
    pytest.param("docs/python_api.md", marks=pytest.mark.slow),
)

_PYTHON = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w/]+\.py)\n")
# What a page shows of the output of the commands before it, and lines of files in it.
SHOWN = re.compile(r"^```bash\n([^`]*)^```\n\n```text\n([^`]*)^```", re.MULTILINE)
_LINE = re.compile(r"\b\w+\.py:\d+")
_BLOCKS = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Commands in sentences.
_INLINE = re.compile(r"`(gshard-\w+[^`]*)`")
_FLAG = re.compile(r"(?<!\S)--[a-zA-Z][\w.]*")
_BLOCK = re.compile(r"^```(bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# All blocks, also within lists, and what begins a line of them that is a command.
_ANY_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_BEGINS_A_COMMAND = re.compile(
    r"gshard-\w+ (?!KIND)|(nohup nice )?python -m |studies/\S+\.sh |%?pip "
    r"|(apt-get|docker|gcloud|kubectl|ray|sky|xprof) "
)


def commands(text: str) -> list[str]:
    """Returns the commands of a page's `bash` and `console` blocks, joining continued lines."""
    found = []
    for language, block in _BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        if language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        found.extend(line.strip() for line in lines if line.strip() and line.strip()[0] != "#")
    return found


def commands_not_run(text: str) -> list[str]:
    """Returns the commands of a page's other blocks, joining continued lines."""
    return [
        line.strip()
        for language, block in _ANY_BLOCK.findall(text)
        if language not in ("bash", "console")
        for line in block.replace("\\\n", " ").splitlines()
        if _BEGINS_A_COMMAND.match(line.strip())
    ]


def write_files(text: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes a page's `python` blocks that begin with `# path/of/file.py` to these files."""
    written = []
    for code, _ in _PYTHON.findall(text):
        name = _FILE.match(code)
        if name:
            path = folder / name[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, encoding="utf-8")
            written.append(path)
    return written


def substitute_test(command: str) -> str | None:
    """Returns the test file that covers a command, if it is not run here."""
    return next((file for shape, file in ELSEWHERE.items() if re.fullmatch(shape, command)), None)


def with_tiny_flags(command: str) -> str:
    """Appends the flags of TINY to their programs, and lets long trainings take a few steps."""
    command = re.sub(r"(gshard-train .*--steps)=\d{4,}", r"\1=4", command)
    for program, flags in TINY.items():
        command = re.sub(rf"(?<![\w-]){program}(?![\w-])", rf"\g<0> {shlex.join(flags)}", command)
    return command


@pytest.fixture
def environment(tmp_path):
    """Returns environment variables that select the commands of this source tree."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for tool in tool_names():
        program = programs / f"gshard-{tool}"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lingvo_gshard {tool} "$@"\n')
        program.chmod(0o755)
    path = f"{programs}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


def slow(page: pathlib.Path) -> list:
    """Marks pages with many commands of one tool as slow; the tool has its own tests."""
    is_slow = page.name in SLOW_PAGES
    return [pytest.mark.slow, pytest.mark.timeout(1800)] if is_slow else []


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=slow(page), id=page.name) for page in PAGES]
)
def test_commands_of_a_page_run(page, tmp_path, environment):
    folder = tmp_path / "work"
    folder.mkdir()
    text = page.read_text(encoding="utf-8")
    write_files(text, folder)
    model = WITH_A_PUBLISHED_MODEL.get(page.name)
    if model:
        published.write(folder / model)
    printed = {}
    for command in commands(text):
        if not model and substitute_test(command):
            continue
        result = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", with_tiny_flags(command)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert result.returncode == 0, f"$ {command}\n{result.stdout}\n{result.stderr}"
        printed[command] = result.stdout + result.stderr
    for block, shown in SHOWN.findall(text):
        output = "".join(printed.get(c, "") for c in commands(f"```bash\n{block}```\n"))
        missing = set(_LINE.findall(shown)) - set(_LINE.findall(output))
        assert not missing, f"{page.name} shows {missing} of {block}; printed:\n{output}"


@pytest.mark.parametrize(
    "page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.parent.name + page.name
)
def test_commands_of_a_page_have_their_flags_and_values(page):
    text = page.read_text(encoding="utf-8")
    for line in commands(text):
        for words in command_lines.commands_in(line):
            command_lines.check(words)
    for line in commands_not_run(text):
        for words in command_lines.commands_in(line.partition("$(")[0].rstrip("&")):
            command_lines.check(words)
    for words in map(str.split, _INLINE.findall(_BLOCKS.sub("", text))):
        for flag in _FLAG.findall(" ".join(words)):
            command_lines.check_name(words, flag)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_no_test_runs_are_listed_with_a_reason(page):
    for line in commands_not_run(page.read_text(encoding="utf-8")):
        assert any(re.fullmatch(shape, line) for shape in NEVER_RUN), line


def test_each_reason_not_to_run_a_command_is_needed():
    found = [line for page in PAGES for line in commands_not_run(page.read_text("utf-8"))]
    for shape in NEVER_RUN:
        assert any(re.fullmatch(shape, line) for line in found), shape


@pytest.mark.parametrize("page", SCRIPTS)
def test_scripts_print_the_output_shown_on_the_page(page, tmp_path, environment):
    text = (ROOT / page).read_text(encoding="utf-8")
    write_files(text, tmp_path)
    blocks = [block for block in _PYTHON.findall(text) if not _FILE.match(block[0])]
    script = "\nprint('\\x1e', end='')\n".join(code for code, _ in blocks)
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\x1e") == [printed for _, printed in blocks]


def test_calls_of_the_python_api_on_its_page_fit_the_functions():
    blocks = _PYTHON.findall((ROOT / "docs" / "python_api.md").read_text(encoding="utf-8"))
    owners, fitted = {"gshard": (gshard, 0), "run": (Run, 1)}, set()
    for node in ast.walk(ast.parse("\n".join(code for code, _ in blocks))):
        match node:
            case ast.Call(ast.Attribute(ast.Name(name), attribute), arguments, keywords):
                if name in owners:
                    owner, bound = owners[name]
                    inspect.signature(getattr(owner, attribute)).bind(
                        *[None] * (bound + len(arguments)), **{k.arg: None for k in keywords}
                    )
                    fitted.add(attribute)
    assert {"experiment", "train", "load", "plan", "partition", "translate", "evaluate"} <= fitted


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_a_page_opens_with_what_its_reader_will_be_able_to_do(page):
    _, opening, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert re.match(r"After reading this page you (can|know)\b", opening)


def test_the_guides_have_few_words():
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    longest = sorted(words.items(), key=lambda item: -item[1])[:5]
    assert sum(words.values()) <= MOST_WORDS, (
        f"README.md and docs/*.md have {sum(words.values()):,} words, at most {MOST_WORDS:,} were "
        "expected. Before you add, take out what no reader acts on: history, what another page "
        "says (link to it), measured asides, tables that a command prints. The longest pages: "
        + ", ".join(f"{name} {count:,}" for name, count in longest)
    )


def test_the_columns_of_the_report_on_experts_are_explained():
    page = (ROOT / "docs" / "experts.md").read_text(encoding="utf-8")
    for column in (*report.NUMBERS, report.MOST_USED):
        assert f"- `{column}`: " in page


@pytest.mark.parametrize("file", sorted(set(ELSEWHERE.values())))
def test_substitute_tests_exist(file):
    assert (ROOT / file).exists()


def test_commands_are_extracted_from_blocks():
    text = """
Text with `gshard-train` in it.

```bash
# A comment.
first --a \\
  --b

second
```

```python
not_a_command()
```

```console
$ third | fourth
what it prints
```
"""
    assert commands(text) == ["first --a    --b", "second", "third | fourth"]


def test_commands_that_are_not_run_are_extracted_from_other_blocks():
    text = """
```bash
gshard-train --list
```

1. A step:

    ```sh
    gshard-plan --a \\
      --b
    input = 1
    ```

```text
gshard-train: error: it failed
```
"""
    assert commands_not_run(text) == ["gshard-plan --a        --b"]


def test_tiny_flags_are_added_only_to_their_programs():
    made = with_tiny_flags("echo my-gshard-train; gshard-train --logdir=runs/gshard-train-2")
    assert made == "echo my-gshard-train; gshard-train --steps=2 --logdir=runs/gshard-train-2"


def test_long_trainings_take_a_few_steps():
    made = with_tiny_flags("gshard-train --logdir=runs/found --steps=2000")
    assert made == "gshard-train --steps=2 --logdir=runs/found --steps=4"
    kept = "gshard-train --logdir=runs/found --steps=20 --replay_step=10"
    assert with_tiny_flags(kept) == kept
