"""Each file of a run, damaged: the command goes on with what is left, and says what is not."""

import json
from collections.abc import Callable

from lingvo_gshard.training.run.monitoring.metrics import MEASURED
from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import trained
from tests.hard_knocks.sandbox import Sandbox

_TRAIN = "gshard-train --experiment=test.tiny --logdir=run"
_EVALUATE = "gshard-evaluate --logdir=run --split=dev"
_NEWEST = "run/checkpoints/12"
_WRITTEN = ("run", "run/*")
_EVALUATED = ("run", "run/evaluations.jsonl")


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


_DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "with a flipped byte": _flipped,
    "cut in half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "gone": lambda data: None,
}
# What training and evaluation read of the newest checkpoint.
_READ = {
    "weights": "theta/d/*",
    "index of the weights": "theta/manifest.ocdbt",
    "record of the run": "run/run.json",
    "vocabulary": "run/extras/words.json",
}
_ONLY_TRAINING_READS = {
    "moments": "moments/d/*",
    "index of the moments": "moments/manifest.ocdbt",
}


def _damage(pattern: str, how: str) -> Callable[[Sandbox], None]:
    """Damages all files that a pattern finds."""

    def step(sandbox: Sandbox) -> None:
        found = list(sandbox.path.glob(pattern))
        assert found, f"{pattern} finds nothing"
        for path in found:
            damaged = _DAMAGES[how](path.read_bytes())
            path.unlink() if damaged is None else path.write_bytes(damaged)

    return step


def _is_as_if_undisturbed(sandbox: Sandbox) -> None:
    """Checks that the run has the metrics of the run that was not damaged."""
    assert _rows(sandbox, "run") == _rows(sandbox, str(sandbox.runs("test.tiny")))


def _rows(sandbox: Sandbox, run: str) -> list[dict[str, float]]:
    text = (sandbox.path / run / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]


def _resumed(what: str, pattern: str, how: str) -> Case:
    """Returns the row of a training that resumes from the checkpoint before the newest."""
    return Case(
        f"training after the {what} became {how}",
        _TRAIN,
        given=(trained("run"), _damage(f"{_NEWEST}/{pattern}", how)),
        changes=_WRITTEN,
        prints=(
            "Warning: the checkpoint of step 12 is damaged: ",
            "The damaged checkpoint was moved to ",
            "Resuming from the checkpoint of step 8",
            "Trained 12 steps",
        ),
        then=(_is_as_if_undisturbed,),
        slow=how != "cut in half" or what not in ("weights", "record of the run"),
    )


def _evaluated(what: str, pattern: str, how: str) -> Case:
    """Returns the row of an evaluation of the checkpoint before the newest."""
    return Case(
        f"evaluation after the {what} became {how}",
        _EVALUATE,
        given=(trained("run"), _damage(f"{_NEWEST}/{pattern}", how)),
        changes=_EVALUATED,
        says="Warning: the checkpoint of step 12 is damaged: ...\n",
        prints=("step 8",),
        slow=True,
    )


def _without_rows(how: str, lost: int) -> Case:
    """Returns the row of a training that resumes without metrics of earlier steps."""
    return Case(
        f"training after the metrics became {how}",
        _TRAIN + " --steps=13",
        given=(trained("run"), _damage("run/metrics.jsonl", how)),
        changes=_WRITTEN,
        prints=(
            "Resuming from the checkpoint of step 12",
            f"Warning: metrics.jsonl lacks the rows of {lost} of the 12 steps so far; they were "
            "damaged or removed",
            "Trained 13 steps",
        ),
        slow=how != "with a flipped byte",
    )


def _no_lock(sandbox: Sandbox) -> None:
    """Writes a lock that no process can have written."""
    (sandbox.path / "run" / "run.lock").write_bytes(b"\xff{")


CASES = (
    *(
        _resumed(what, pattern, how)
        for what, pattern in {**_READ, **_ONLY_TRAINING_READS}.items()
        for how in _DAMAGES
    ),
    *(_evaluated(what, pattern, how) for what, pattern in _READ.items() for how in _DAMAGES),
    _without_rows("with a flipped byte", 1),
    _without_rows("empty", 12),
    _without_rows("gone", 12),
    *(
        Case(
            f"training after the curves became {how}",
            _TRAIN + " --steps=13",
            given=(trained("run"), _damage("run/events/*", how)),
            changes=_WRITTEN,
            prints=("Resuming from the checkpoint of step 12", "Trained 13 steps"),
            slow=True,
        )
        for how in _DAMAGES
    ),
    *(
        Case(
            f"training where the weights of all checkpoints are {how}",
            _TRAIN,
            given=(trained("run"), _damage("run/checkpoints/*/theta/d/*", how)),
            changes=_WRITTEN,
            error=".../run/checkpoints: none of its 3 checkpoints is readable",
            slow=how != "empty",
        )
        for how in _DAMAGES
    ),
    *(
        Case(
            f"{tool} where all weights are {how}",
            f"gshard-{tool} --logdir=run",
            stdin=b"Hund\n",
            given=(trained("run", name), _damage("run/checkpoints/*/theta/d/*", how)),
            code=1,
            says=f"Warning: the checkpoint of step ...gshard-{tool.split()[0]}: error: ..."
            "/run/checkpoints: none of its ...checkpoint... readable\n",
            slow=True,
        )
        for tool, name in (
            ("translate", "translation"),
            ("evaluate", "translation"),
            ("experts report", "translation"),
            ("generate", "language model"),
        )
        for how in _DAMAGES
    ),
    Case(
        "training where a lock is no lock",
        _TRAIN,
        given=(trained("run"), _no_lock),
        changes=_WRITTEN,
        prints=("Nothing to do: ",),
        seconds=150,
        slow=True,
    ),
)
