"""Faults while a run trains: signals, a second trainer, limits of the system; wrong checks."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import corpus, trained, write

_TRAIN = "gshard-train --experiment=test.tiny --logdir=run "
_FROM_FILES = "gshard-train --experiment=translation.from_files --gin_file=small.gin --logdir=run "
_ENDLESS = "--steps=1000000"
_RUN = ("run", "run/*")


def _stopped(name: str, word: str, code: int) -> Case:
    """Returns the row of a signal that ends training in order."""
    return Case(
        f"{name} while a run trains",
        _TRAIN + _ENDLESS,
        signal=name,
        changes=_RUN,
        code=code,
        says=f"\ngshard-train: {word}: finishing the step and saving. Repeat after 2 s to quit "
        "without saving\n",
        prints=(f"{word}: saved at step ", "Continue with:\n  gshard-train ..." + _ENDLESS),
    )


CASES = (
    _stopped("SIGHUP", "SIGHUP", 129),
    _stopped("SIGTERM", "SIGTERM", 143),
    _stopped("SIGINT", "Ctrl-C", 130),
    Case(
        "a second trainer in the same directory",
        _TRAIN + _ENDLESS,
        meanwhile=_TRAIN + _ENDLESS,
        changes=_RUN,
        error="--logdir=...run is in use by process ... on ..., since ... UTC. Stop that run "
        "first, or choose another directory",
    ),
    Case(
        "an evaluation beside a trainer",
        "gshard-evaluate --logdir=run --split=dev",
        given=(trained("run"),),
        meanwhile=_TRAIN + _ENDLESS,
        changes=_RUN,
        prints=("perplexity",),
    ),
    Case(
        "a disk that fills up with metrics",
        _TRAIN + "--steps=24",
        limits={"RLIMIT_FSIZE": 5000},
        changes=_RUN,
        prints=(
            "Warning: metrics.jsonl cannot be written (File too large); new rows wait in memory",
            "Warning: metrics.jsonl lacks the last ... rows, which could not be written",
            "Trained 24 steps",
        ),
    ),
    Case(
        "a disk that fills up with a checkpoint",
        _FROM_FILES + "--steps=2",
        given=(corpus(),),
        limits={"RLIMIT_FSIZE": 60_000},
        changes=_RUN,
        error="step 2 could not be saved. Free some disk space; the same command then resumes from "
        "step 0",
        prints=("Warning: the checkpoint of step 2 could not be saved (",),
        slow=True,
    ),
    Case(
        "groups of 7 tokens, of which rows and devices have no whole number",
        _FROM_FILES + "--steps=1 --gin_param='task.encoder.moe.group_size = 7' --runtime=spmd "
        "--mesh=data=2 --strategy=expert",
        given=(corpus(),),
        changes=_RUN,
        says="Warning: encoder.layers[0].feed_forward: 37 token groups do not divide evenly over 2 "
        "devices. Choose a group_size that gives a multiple of 2 groups to avoid padding and extra "
        "communication.\n",
        prints=("Trained 1 steps",),
        slow=True,
    ),
    Case(
        "too few open files",
        _TRAIN,
        limits={"RLIMIT_NOFILE": 12},
        error="open files are limited to 12 (ulimit -n). TensorFlow, jax and checkpoints need at "
        "least 64. Raise the limit with: ulimit -n 1024",
    ),
    Case(
        "too little virtual memory",
        "gshard-train --experiment=translation.quickstart --logdir=run",
        limits={"RLIMIT_AS": 2**30},
        error="virtual memory is limited to 1.0 GiB (ulimit -v). TensorFlow and jax need at least "
        "4 GiB, most of which they never touch. Remove the limit with: ulimit -v unlimited",
        new_process=True,
        slow=True,
    ),
    Case(
        "a disk that is full before the first step",
        _TRAIN,
        limits={"RLIMIT_FSIZE": 300},
        error="--logdir=.../run cannot be written: File too large",
        changes=("run", "run/*"),
    ),
    Case(
        "a disk that is full when a run goes on",
        _TRAIN + "--steps=16",
        given=(trained("run"),),
        limits={"RLIMIT_FSIZE": 300},
        error="--logdir=.../run cannot be written: File too large",
        prints=("Resuming from the checkpoint of step 12",),
        changes=("run/run.lock", "run/params.txt.new"),
    ),
    Case(
        "a replay without a directory",
        "gshard-train --replay_step=3",
        error="--logdir is missing: the directory of the run to replay",
    ),
    Case(
        "a replay of step 0",
        "gshard-train --logdir=run --replay_step=0",
        error="--replay_step=0: ...",
    ),
    Case(
        "a replay of a step that no run took",
        "gshard-train --logdir=run --replay_step=13",
        given=(trained("run"),),
        error="--replay_step=13: ...metrics.jsonl has no row of this step; its last row up to "
        "there is of step 12",
    ),
    Case(
        "a replay of a step before all checkpoints",
        "gshard-train --logdir=run --replay_step=4",
        given=(trained("run"),),
        error="--replay_step=4: ...checkpoints holds no checkpoint before this step; the oldest "
        "that was kept is of step 4. run.keep_checkpoints says how many are kept",
    ),
    Case(
        "a replay with other steps",
        "gshard-train --logdir=run --replay_step=9 --steps=20",
        given=(trained("run"),),
        error="--steps=20 cannot be combined with --replay_step=9: a run is replayed with its own "
        "Params",
    ),
    Case(
        "a negative number of steps between checks",
        "gshard-train --experiment=test.tiny --logdir=run --check_determinism_every=-1",
        error="--check_determinism_every=-1: ...",
    ),
    Case(
        "a hang of no seconds",
        "gshard-train --experiment=test.tiny --logdir=run --gin_param='run.hang_seconds = 0.0'",
        error="...run.hang_seconds is 0.0; expected ...",
    ),
    Case(
        "a policy that is unknown",
        _TRAIN + "--gin_param='step.spikes.policy = \"rollback\"'",
        error="...policy is 'rollback'; expected 'off', 'warn', 'skip' or 'roll_back'",
    ),
    Case(
        "a damaged file of roll backs",
        "gshard-train --experiment=test.tiny --logdir=run --steps=14",
        given=(trained("run"), write("run/roll_backs.jsonl", '{"step": 9}\n')),
        changes=("run", "run/*"),
        error="...roll_backs.jsonl:1 is damaged: Object missing required field `first_spike`",
    ),
)
