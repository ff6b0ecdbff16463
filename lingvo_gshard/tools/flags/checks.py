"""Flags of gshard-train that check whether the machine computes right."""

from __future__ import annotations

import dataclasses

import rich.console
from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.runtime import runtime_options
from lingvo_gshard.training.run import processes

# Flags that change a run, and so cannot be given with --replay_step.
_CHANGES = (
    *("experiment", "gin_param", "gin_file", "init_from", "steps", "seed"),
    "check_determinism_every",
)


def define_check_flags(values: flags.FlagValues) -> None:
    """Defines the flags of a command that trains."""
    flags.DEFINE_integer(
        "check_determinism_every",
        None,
        "Computes every so many-th step twice and compares all bits; 0: none. Sets "
        "run.check_determinism_every.",
        0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "replay_step",
        None,
        "Trains nothing: computes this step of the run in --logdir again, from the checkpoint "
        "before it, and compares it with what the run recorded.",
        1,
        flag_values=values,
    )


def replay_step(values: flags.FlagValues, console: rich.console.Console) -> int:
    """Computes --replay_step again. Returns 0 if it is equal to what was recorded, else 2."""
    if not values.logdir:
        raise UserError("--logdir is missing: the directory of the run to replay")
    for name in _CHANGES:
        given = values[name].value
        if given:
            shown = given[0] if isinstance(given, list) else given
            raise UserError(
                f"--{name}={shown} cannot be combined with --replay_step={values.replay_step}: a "
                "run is replayed with its own Params"
            )
    # Training does not wait for what a replay needs.
    from lingvo_gshard.api.replay import replay

    found = replay(
        values.logdir, values.replay_step, options=runtime_options(values), console=console
    )
    if processes.is_main():
        record = {"logdir": values.logdir, **dataclasses.asdict(found)}
        output.write_json(values.json, {**record, "is_equal": found.is_equal})
    return 0 if found.is_equal else 2
