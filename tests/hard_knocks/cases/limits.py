"""Resource limits that are reached: open files, file sizes, memory."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import trained

_TRAIN = "gshard-train --experiment=test.tiny --logdir=run "

CASES = (
    Case(
        "too few open files",
        _TRAIN,
        limits={"RLIMIT_NOFILE": 12},
        error="open files are limited to 12 (ulimit -n). TensorFlow, jax and checkpoints need at "
        "least 64. Raise the limit with: ulimit -n 1024",
    ),
    Case(
        "too little virtual memory",
        _TRAIN,
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
        error="--logdir .../run cannot be written: File too large",
        changes=("run", "run/*"),
    ),
    Case(
        "a disk that is full when a run goes on",
        _TRAIN + "--steps=16",
        given=(trained("run"),),
        limits={"RLIMIT_FSIZE": 300},
        error="--logdir .../run cannot be written: File too large",
        prints=("Resuming from the checkpoint of step 12",),
        changes=("run/run.lock", "run/params.txt.new"),
    ),
)
