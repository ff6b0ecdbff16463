"""--plan: the experiment, mesh, strategy and options of a file that gshard-plan --json wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import flags

from lingvo_gshard.api.experiments import apply_settings, planned
from lingvo_gshard.core import Params, UserError
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.tools.flags.run import experiment_params

if TYPE_CHECKING:
    from lingvo_gshard.wings.planning.planned_training import PlannedTraining

# Flags that a plan's Params answer, each the name of one in `sharding`.
_ANSWERED = ("mesh", "strategy", "device_order", "partitioner", "compile_options")
# Changes of these Params are no changes of the planned step.
_BESIDE_THE_STEP = "run."


def plan_flag(note: str = "") -> str:
    """Returns the help of --plan, with a note on what else the command does with the plan."""
    help = (
        "File that gshard-plan --json wrote, with or without --search: takes its experiment with "
        "all settings, mesh, strategy and options of the compiler."
    )
    return f"{help} {note}".rstrip()


def planned_training(values: flags.FlagValues) -> PlannedTraining | None:
    """Returns what --plan describes; None without it. Raises UserError if a flag contradicts it."""
    if values.plan is None:
        return None
    found = planned(values.experiment or "", values.plan)
    _check_answered(values, found)
    return found


def requested_params(
    values: flags.FlagValues, plan: PlannedTraining | None, say: Callable[[str], object]
) -> Params:
    """Returns the Params of --plan, or else of --experiment, with all settings.

    Says each setting that changes the planned step. Raises UserError if one contradicts the plan.
    """
    if plan is None:
        return experiment_params(values)
    params = apply_settings(plan.params, values.gin_param, values.gin_file)
    for path, before, now in plan.params.diff(params):
        if path.startswith("sharding."):
            raise UserError(
                f"{path} = {now} contradicts --plan={values.plan}, which has {before}; leave out "
                "one of them"
            )
        if not path.startswith(_BESIDE_THE_STEP):
            say(f"Not as planned: {path} is {now}, planned with {before}")
    return params


def _check_answered(values: flags.FlagValues, plan: PlannedTraining) -> None:
    """Raises UserError if a flag has another value than the plan."""
    sharding = plan.params.sharding
    for name in _ANSWERED:
        if name not in values or not values[name].present:
            continue
        given: Any = values[name].value
        known = sharding.get(name)
        if name == "mesh":
            given = str(Mesh.parse(given))
        if name == "compile_options":
            given, known = ", ".join(given), ", ".join(known) or "the default"
        if given != known:
            raise UserError(
                f"--{name}={given} contradicts --plan={values.plan}, which has {known}; leave out "
                "one of them"
            )
