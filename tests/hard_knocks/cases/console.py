"""Standard streams that are closed, full or not text, and flags of the console."""

from tests.hard_knocks.case import CLOSED, FULL, Case
from tests.hard_knocks.prepare import folder, remove, trained, write

_TRANSLATE = "gshard-translate --logdir=run"
_GENERATE = "gshard-generate --logdir=run"
_RUN = (trained("run", "translation"),)
_WRITER = (trained("run", "language model"),)

CASES = (
    Case(
        "a name with commands to the terminal",
        "gshard-evaluate --logdir=\x1b]0;mine\x07run",
        error="--logdir=\\x1b]0;mine\\x07run: there is no such directory. ...",
    ),
    Case(
        "an unknown command",
        "python -m lingvo_gshard trian",
        says="lingvo_gshard: error: unknown command 'trian'. Did you mean 'train'?\n",
        code=1,
    ),
    Case(
        "a command that is a path",
        "python -m lingvo_gshard ../train",
        says="lingvo_gshard: error: unknown command '../train'. ...\n",
        code=1,
    ),
    Case("no command", "python -m lingvo_gshard", prints=("Commands:", "gshard-train")),
    Case(
        "help with a wrong flag", "gshard-train --help --stepz", prints=("--experiment=EXPERIMENT",)
    ),
    Case(
        "help where standard output is closed",
        "gshard-train --help",
        stdout=CLOSED,
        error="standard output is closed. Redirect it to a file, or to /dev/null",
    ),
    Case(
        "a list where standard output is closed",
        "gshard-train --list",
        stdout=CLOSED,
        error="standard output is closed. Redirect it to a file, or to /dev/null",
    ),
    Case(
        "an error where standard error is closed",
        "gshard-train --experiment=x --logdir=run",
        stderr=CLOSED,
        code=1,
    ),
    Case(
        "an error where all streams are closed",
        "gshard-train --experiment=x --logdir=run",
        stdin=CLOSED,
        stdout=CLOSED,
        stderr=CLOSED,
        code=1,
    ),
    Case(
        "training where standard input is closed",
        "gshard-train --experiment=test.tiny --logdir=run",
        stdin=CLOSED,
        changes=("run*",),
        prints=("Trained 12 steps",),
    ),
    Case(
        "translation without standard input",
        _TRANSLATE,
        given=_RUN,
        stdin=CLOSED,
        error="standard input is closed; this command reads a line for each answer",
    ),
    Case(
        "translation without standard output",
        _TRANSLATE,
        given=_RUN,
        stdin=b"Hund\n",
        stdout=CLOSED,
        error="standard output is closed. Redirect it to a file, or to /dev/null",
    ),
    Case(
        "translation to a full device",
        _TRANSLATE,
        given=_RUN,
        stdin=b"Hund\n",
        stdout=FULL,
        says="Warning: line 1 has an empty translation: ...\n",
        error="standard output cannot be written: No space left on device",
        slow=True,
    ),
    Case("translation of nothing", _TRANSLATE, given=_RUN),
    Case(
        "translation of what is not UTF-8",
        _TRANSLATE,
        given=_RUN,
        stdin=b"\xff\n",
        error="standard input: line 1 is not UTF-8 (byte 1); --on_bad_line=skip leaves "
        "such lines empty",
    ),
    Case(
        "translation of UTF-16",
        _TRANSLATE,
        given=_RUN,
        stdin="Hund\n".encode("utf-16"),
        error="standard input: line 1 is not UTF-8 (byte 1); --on_bad_line=skip leaves "
        "such lines empty",
    ),
    Case(
        "translation with an unknown way for bad lines",
        _TRANSLATE + " --on_bad_line=drop",
        given=_RUN,
        error="--on_bad_line=drop is unknown. Valid: refuse, skip.",
    ),
    Case(
        "generation of what is not UTF-8",
        _GENERATE,
        given=_WRITER,
        stdin=b"a\xff\n",
        error="standard input: line 1 is not UTF-8 (byte 2); --on_bad_line=skip leaves such"
        " lines empty",
    ),
    Case(
        "a report into a directory",
        "gshard-evaluate --logdir=run --json=dir",
        given=(*_RUN, folder("dir")),
        error="--json=dir cannot be written: it is a directory; a file was expected",
    ),
    Case(
        "a report into a directory that is not there",
        "gshard-evaluate --logdir=run --json=no/a.json",
        given=_RUN,
        error="--json=no/a.json cannot be written: there is no directory no; create it "
        "first, or name another one",
    ),
    Case(
        "a report under a file",
        "gshard-evaluate --logdir=run --json=file/a.json",
        given=(*_RUN, write("file", "x")),
        error="--json=file/a.json cannot be written: file is no directory",
    ),
    Case(
        "a report that nobody may write",
        "gshard-evaluate --logdir=run --json=/proc/a.json",
        given=_RUN,
        error="--json=/proc/a.json cannot be written: no such file or directory",
    ),
    Case(
        "a width that is no number",
        "gshard-train --list",
        environment={"COLUMNS": "wide"},
        prints=("translation.quickstart",),
    ),
    Case(
        "a terminal without UTF-8",
        "gshard-train --list",
        environment={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
        prints=("translation.quickstart",),
    ),
    Case(
        "a home that is not there",
        "gshard-train --experiment=test.tiny --logdir=run --steps=2",
        environment={"HOME": "/proc/home", "XDG_CACHE_HOME": ""},
        changes=("run*",),
        prints=("Trained 2 steps",),
    ),
    Case(
        "help to a full device",
        "gshard-train --help",
        stdout=FULL,
        error="standard output cannot be written: No space left on device",
    ),
    Case(
        "a version to a full device",
        "gshard-train --version",
        stdout=FULL,
        error="standard output cannot be written: No space left on device",
    ),
    Case(
        "a list to a full device",
        "gshard-train --list",
        stdout=FULL,
        error="standard output cannot be written: No space left on device",
    ),
    Case(
        "machines to a full device",
        "gshard-plan --list_topologies",
        stdout=FULL,
        error="standard output cannot be written: No space left on device",
    ),
    Case(
        "hyperparameters to a full device",
        "gshard-train --experiment=test.tiny --params",
        stdout=FULL,
        error="standard output cannot be written: No space left on device",
    ),
    Case(
        "commands to a full device",
        "python -m lingvo_gshard",
        stdout=FULL,
        says="lingvo_gshard: error: standard output cannot be written: No space left on device\n",
        code=1,
    ),
    Case(
        "commands where standard output is closed",
        "python -m lingvo_gshard",
        stdout=CLOSED,
        says="lingvo_gshard: error: standard output is closed. Redirect it to a file, or to "
        "/dev/null\n",
        code=1,
    ),
    Case(
        "an error to a full device",
        "gshard-train --experiment=x --logdir=run",
        stderr=FULL,
        code=1,
    ),
    Case(
        "a warning to a full device",
        "gshard-evaluate --logdir=run --split=dev",
        given=(trained("run"), remove("run/params.txt")),
        stderr=FULL,
        changes=("run", "run/evaluations.jsonl"),
        prints=("perplexity",),
    ),
    Case(
        "a width of 0",
        "gshard-train --list",
        environment={"COLUMNS": "0"},
        prints=("translation.quickstart\n",),
    ),
    Case(
        "a table of width 1",
        "gshard-evaluate --logdir=run --split=dev",
        given=(trained("run"),),
        environment={"COLUMNS": "1"},
        changes=("run", "run/evaluations.jsonl"),
        prints=("perplexity",),
    ),
    # Libraries say nothing when they are loaded, and when they start and compile.
    Case(
        "an inspection in a new process",
        "gshard-inspect --experiment=translation.quickstart --mesh=data=4",
        new_process=True,
        prints=("strategy",),
        slow=True,
    ),
    Case(
        "a translation in a new process",
        _TRANSLATE,
        given=_RUN,
        stdin=b"Hund\n",
        new_process=True,
        says="Warning: line 1 has an empty translation: ...\n",
        slow=True,
    ),
    Case(
        "a plan for a TPU in a new process",
        "gshard-plan --experiment=translation.quickstart --topology=v3:2x2 --mesh=data=8 "
        "--gin_param='task.encoder.moe.group_size = 96' "
        "--gin_param='task.decoder.moe.group_size = 80'",
        needs="libtpu",
        new_process=True,
        says="[... s] libtpu ... compiles the step: ...\n[... s] tracing and lowering\n"
        "[... s] compiling for v3:2x2\n[... s] reading the compiled program\n",
        slow=True,
        seconds=300.0,
    ),
    Case(
        "a measurement in a new process",
        "gshard-bench step --repeats=1",
        new_process=True,
        slow=True,
        seconds=300.0,
    ),
)
