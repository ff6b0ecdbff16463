"""Run directories and checkpoints that are missing, foreign, or damaged."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import cut, folder, remove, replace, trained, write

_LONGER = "gshard-train --experiment=test.tiny --logdir=run --steps=14"
_RUN = (trained("run"),)
_EVALUATE = "gshard-evaluate --logdir=run"
_EVALUATED = ("run", "run/evaluations.jsonl")

CASES = (
    Case(
        "a logdir that is a file",
        "gshard-train --experiment=test.tiny --logdir=run",
        given=(write("run", "x"),),
        error="--logdir=.../run is a file; a directory was expected",
    ),
    Case(
        "a logdir under a file",
        "gshard-train --experiment=test.tiny --logdir=run/a",
        given=(write("run", "x"),),
        error="--logdir=.../run/a cannot be written: Not a directory",
    ),
    Case(
        "a logdir that nobody may write",
        "gshard-train --experiment=test.tiny --logdir=/proc/run",
        error="--logdir=/proc/run cannot be written: No such file or directory",
    ),
    Case(
        "a logdir with a name that is too long",
        "gshard-train --experiment=test.tiny --logdir=" + 300 * "x",
        error="--logdir=...xxx cannot be written: File name too long",
    ),
    Case(
        "a logdir of another experiment",
        "gshard-train --experiment=language_model.quickstart --logdir=run",
        given=_RUN,
        error="--logdir=...run holds a run of test.tiny with other Params. Choose another "
        "directory, or the same Params:\n...  and ... more",
    ),
    Case(
        "a logdir of other Params",
        _LONGER + " --gin_param='input.rows = 8'",
        given=_RUN,
        error="--logdir=...run holds a run of test.tiny with other Params. Choose another "
        "directory, or the same Params:\n  input.rows: 16 there, 8 here",
    ),
    Case(
        "a logdir of another seed",
        _LONGER + " --seed=3",
        given=_RUN,
        error="--logdir=...run holds a run of test.tiny with other Params. Choose another "
        "directory, or the same Params:\n  step.seed: 1 there, 3 here",
    ),
    Case(
        "an evaluation of nothing",
        _EVALUATE,
        error="--logdir=run: there is no such directory. Train one first: gshard-train "
        "--experiment=NAME --logdir=run",
    ),
    Case(
        "an evaluation without a logdir",
        "gshard-evaluate",
        error="--logdir is missing: the directory that gshard-train wrote",
    ),
    Case(
        "an evaluation of an empty directory",
        _EVALUATE,
        given=(folder("run"),),
        error="--logdir=run: there is no run in it (no params.txt). Train one first: "
        "gshard-train --experiment=NAME --logdir=run",
    ),
    Case(
        "an evaluation of a file",
        _EVALUATE,
        given=(write("run", "x"),),
        error="--logdir=run: there is no such directory. Train one first: gshard-train "
        "--experiment=NAME --logdir=run",
    ),
    Case(
        "an evaluation of an unknown split",
        _EVALUATE + " --split=trest",
        given=_RUN,
        error="--split=trest is unknown. Valid: dev, train.",
    ),
    Case(
        "an evaluation of a split that is not there",
        _EVALUATE + " --split=test",
        given=_RUN,
        error="--split=test is unknown. Valid: dev, train.",
    ),
    Case(
        "a run without checkpoints",
        _EVALUATE + " --split=dev",
        given=(trained("run"), remove("run/checkpoints")),
        error="--logdir=run: the run of test.tiny has no checkpoint yet. One is saved every"
        " run.checkpoint_every_steps steps, at the end, and on Ctrl-C",
    ),
    Case(
        "a run with an empty directory of checkpoints",
        _EVALUATE + " --split=dev",
        given=(trained("run"), remove("run/checkpoints"), folder("run/checkpoints")),
        error="--logdir=run: the run of test.tiny has no checkpoint yet. One is saved every"
        " run.checkpoint_every_steps steps, at the end, and on Ctrl-C",
    ),
    Case(
        "checkpoints that are a file",
        _EVALUATE + " --split=dev",
        given=(trained("run"), remove("run/checkpoints"), write("run/checkpoints", "x")),
        error="--logdir=run: the run of test.tiny has no checkpoint yet. One is saved every"
        " run.checkpoint_every_steps steps, at the end, and on Ctrl-C",
    ),
    Case(
        "all checkpoints without weights",
        _EVALUATE + " --split=dev",
        given=(trained("run"), *(remove(f"run/checkpoints/{s}/theta") for s in (4, 8, 12))),
        code=1,
        says="Warning: the checkpoint of step 12 is damaged: ...\n...gshard-evaluate: "
        "error: ...run/checkpoints: none of its 3 checkpoints is readable\n",
    ),
    Case(
        "all checkpoints without a record of the run",
        _EVALUATE + " --split=dev",
        given=(trained("run"), *(remove(f"run/checkpoints/{s}/run") for s in (4, 8, 12))),
        error=".../run/checkpoints: none of its 3 checkpoints is readable",
    ),
    Case(
        "a run of a stranger whose Params name a module beside it",
        "gshard-evaluate --logdir=run --split=dev",
        given=(
            trained("run"),
            remove("run/checkpoints"),
            replace("run/params.txt", "lingvo_gshard.training.step.adam", "tweaks"),
            write("tweaks.py", "print('this must not run')"),
        ),
        error="...params.txt: the Params name classes of tweaks, which is code of its "
        "own. If you trust it, add --import=tweaks",
    ),
    Case(
        "a module to import that is not there",
        "gshard-evaluate --logdir=run --import=tweaks",
        error="--import=tweaks: there is no such module; it must be installed, in the current "
        "directory or on PYTHONPATH",
    ),
    Case(
        "params.txt that is a directory",
        _EVALUATE + " --split=dev",
        given=(trained("run"), remove("run/params.txt"), folder("run/params.txt")),
        changes=_EVALUATED,
        says="Warning: ...run/params.txt cannot be read: Is a directory; using the copy "
        "in the checkpoint of step 12\n",
    ),
    Case(
        "params.txt that is cut",
        _EVALUATE + " --split=dev",
        given=(trained("run"), cut("run/params.txt", 0.3)),
        changes=_EVALUATED,
        says="Warning: ...run/params.txt: line ...; using the copy in the checkpoint of step 12\n",
    ),
    Case(
        "params.txt that is empty",
        _EVALUATE + " --split=dev",
        given=(trained("run"), cut("run/params.txt", 0)),
        changes=_EVALUATED,
        says="Warning: ...run/params.txt is cut off: it does not end with task; using "
        "the copy in the checkpoint of step 12\n",
    ),
    Case(
        "params.txt that is not text",
        _EVALUATE + " --split=dev",
        given=(trained("run"), write("run/params.txt", b"\xff\xfe")),
        changes=_EVALUATED,
        says="Warning: ...run/params.txt: ...; using the copy in the checkpoint of step 12\n",
    ),
    Case(
        "params.txt that is gone",
        _EVALUATE + " --split=dev",
        given=(trained("run"), remove("run/params.txt")),
        changes=_EVALUATED,
        says="Warning: ...run holds no run: it has no params.txt; using the copy in the "
        "checkpoint of step 12\n",
    ),
    Case(
        "params.txt that names an unknown class",
        _EVALUATE + " --split=dev",
        given=(trained("run"), replace("run/params.txt", "TinyDense", "TinyDens")),
        changes=_EVALUATED,
        says="Warning: ...run/params.txt: line ...: task.hidden.cls: "
        "'tests.tiny.TinyDens': tests.tiny defines no class or function of this name; using the "
        "copy in the checkpoint of step 12\n",
    ),
    Case(
        "params.txt with an unknown name",
        _EVALUATE + " --split=dev",
        given=(trained("run"), replace("run/params.txt", "run.steps", "run.stepz")),
        changes=_EVALUATED,
        says="Warning: ...run/params.txt: line ...: run.stepz: ... Did you mean "
        "'steps'?; using the copy in the checkpoint of step 12\n",
    ),
    Case(
        "a flag that evaluation lacks",
        _EVALUATE + " --step=5",
        given=_RUN,
        error="Unknown command line flag 'step'. Did you mean: stop ?",
    ),
    Case(
        "a translation by a model that cannot",
        "gshard-translate --logdir=run",
        given=_RUN,
        error="--logdir=run: the run of test.tiny has the task TinyTask, which decodes no texts",
    ),
    Case(
        "a generation by a model that cannot",
        "gshard-generate --logdir=run",
        given=_RUN,
        error="--logdir=run: the run of test.tiny has the task TinyTask, which decodes no texts",
    ),
    Case(
        "experts of a model that has none",
        "gshard-experts report --logdir=run",
        given=_RUN,
        error="--logdir=run: the run of test.tiny has the task TinyTask, which decodes no texts",
    ),
    Case(
        "a translation by a language model",
        "gshard-translate --logdir=run",
        given=(trained("run", "language model"),),
        error="--logdir=run: the run of language_model.from_files has the task "
        "LanguageModelTask, which continues texts (gshard-generate) and does not translate",
    ),
    Case(
        "a generation by a translation model",
        "gshard-generate --logdir=run",
        given=(trained("run", "translation"),),
        error="--logdir=run: the run of translation.from_files has the task "
        "TranslationTask, which translates (gshard-translate) and does not continue texts",
        slow=True,
    ),
)
