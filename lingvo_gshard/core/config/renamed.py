"""Names in the params.txt of earlier versions, and what they are called today."""

from __future__ import annotations

# Options of a run that were the trainer's. Its other options are those of the step.
_OF_THE_RUN = frozenset(
    (
        "steps",
        "log_every_steps",
        "checkpoint_every_steps",
        "evaluate_every_steps",
        "keep_checkpoints",
        "keep_best",
        "patience",
        "writers",
        "routers",
        "hang_factor",
        "hang_seconds",
        "save_seconds",
        "check_determinism_every",
    )
)
_TRAINER = "trainer"
_RUN_OPTIONS = "lingvo_gshard.training.run.options"
# Module -> the module that has its classes today.
_MODULES = {
    "lingvo_gshard.training.trainer": "lingvo_gshard.training.step.trainer",
    "lingvo_gshard.training.local_updates": "lingvo_gshard.training.step.local_updates",
    "lingvo_gshard.training.loss_scale": "lingvo_gshard.training.step.loss_scale",
    "lingvo_gshard.training.spikes.rule": "lingvo_gshard.training.step.spikes",
    "lingvo_gshard.training.monitoring.routers.settings": _RUN_OPTIONS,
    **{
        f"lingvo_gshard.training.optim.{name}": f"lingvo_gshard.training.step.{name}"
        for name in ("adafactor", "adam", "lion", "momentum", "optimizer", "schedules")
    },
}


def path_today(path: str) -> str:
    """Returns what a path of Params is called today."""
    first, _, rest = path.partition(".")
    if first != _TRAINER or not rest:
        return path
    name = rest.partition(".")[0]
    return f"{'run' if name in _OF_THE_RUN else 'step'}.{rest}"


def lines_today(lines: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """Returns lines of a params.txt with today's names.

    Args:
      lines: (path, value, number of the line).
    """
    found = [(path_today(path), _value_today(value), number) for path, value, number in lines]
    is_old = any(path == f"{_TRAINER}.cls" for path, _, _ in lines)
    return [*found, ("run.cls", f"{_RUN_OPTIONS}.RunOptions", 0)] if is_old else found


def last_path(text: str) -> str | None:
    """Returns the path that the last line of an earlier version's params.txt has.

    None for a text of today's version.
    """
    return f"{_TRAINER}.writers" if f"\n{_TRAINER}." in text else None


def _value_today(value: str) -> str:
    """Returns the name of a class, or any other value, as it is written today."""
    module, _, name = value.rpartition(".")
    return f"{_MODULES[module]}.{name}" if module in _MODULES else value
