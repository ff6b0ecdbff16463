"""Experiments by name, with settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lingvo_gshard.core import Params, UserError, listed, params_text, registry
from lingvo_gshard.wings.gin.binding import apply_gin, to_gin

if TYPE_CHECKING:
    from lingvo_gshard.wings.planning.planned_training import PlannedTraining


def experiment(
    name: str = "",
    settings: str | Sequence[str] = (),
    gin_files: Sequence[str | os.PathLike] = (),
    plan: str | os.PathLike | None = None,
) -> Params:
    """Returns the Params of an experiment, with settings applied.

        >>> params = gshard.experiment("translation.quickstart", ["run.steps = 100"])
        >>> params.run.steps
        100

    Args:
      name: a name of `experiments()`, such as "translation.quickstart"; may be empty if one of
        `gin_files` is the params.txt of a run, and with a plan.
      settings: gin statements, such as "run.steps = 100"; applied after the files.
      gin_files: paths of gin files. The params.txt of a run sets every hyperparameter, so it is
        applied before all gin files.
      plan: file that gshard-plan --json wrote, with or without --search: the Params are those that
        were planned, with mesh, strategy and options of the compiler in `sharding`. Settings and
        gin files change them.

    Raises:
      UserError: a name, path or value is wrong, or the plan is of something else. The message has
        the nearest valid name.
    """
    if plan is not None:
        return apply_settings(planned(name, plan).params, settings, gin_files)
    saved = [path for path in gin_files if params_text.is_params_text(path)]
    if saved:
        params = params_text.read(saved[-1])
        _check_name(name, params.name, f"gin_files={os.fspath(saved[-1])}")
        return apply_settings(params, settings, [path for path in gin_files if path not in saved])
    if not name:
        raise UserError("`experiment` is missing; gshard-train --list shows the experiments")
    return apply_settings(registry.get(name), settings, gin_files)


def planned(name: str, plan: str | os.PathLike) -> PlannedTraining:
    """Returns what the file of a plan describes.

    Args:
      name: the experiment that the plan must be of; empty for any.

    Raises:
      UserError: it is no plan of a training, or of another experiment.
    """
    # Experiments without a plan do not wait for the planner.
    from lingvo_gshard.wings.planning.planned_training import load

    if name:
        # A file may name classes of the user's module only if the user has named the module.
        registry.get(name)
    found = load(plan)
    _check_name(name, found.name, f"plan={os.fspath(plan)}")
    return found


def _check_name(asked: str, found: str, source: str) -> None:
    """Raises UserError if a file is of another experiment than the one that was asked for."""
    if asked and found != asked:
        raise UserError(
            f"`{source}` is of the experiment {found}, not {asked}; leave out `experiment`"
        )


def describe(params: Params, pattern: str = "") -> str:
    """Returns hyperparameters with their meaning, as gin that `gin_files` can read.

        >>> print(gshard.describe(params, "clip_norm"))
        # Largest global norm of the gradient; 0: no limit. ...
        step.clip_norm = 1.0

    Args:
      params: the experiment, as `experiment` returns it.
      pattern: part of the paths to describe, such as "dropout", or a pattern with wildcards such as
        "trainer.*"; empty describes all.

    Raises:
      UserError: no path matches. The message has the nearest name.
    """
    return to_gin(as_params(params), pattern)


def experiments() -> dict[str, str]:
    """Returns the purpose of each registered experiment, in one line, by name.

    >>> "translation.quickstart" in gshard.experiments()
    True
    """
    return {name: registry.describe(name).splitlines()[0] for name in registry.names()}


def as_params(params: Params | str) -> Params:
    """Returns Params. Raises UserError if the name of an experiment is given in their place."""
    if isinstance(params, str):
        raise UserError(f"{params!r} is a name; gshard.experiment({params!r}) returns the Params")
    return params


def apply_settings(
    params: Params, settings: Sequence[str], gin_files: Sequence[str | os.PathLike]
) -> Params:
    """Returns a copy of `params` with gin files and then single settings applied."""
    return apply_gin(params, [os.fspath(path) for path in gin_files], listed(settings))
