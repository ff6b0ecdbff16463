"""Proves that a partitioned training step computes what the same step computes on one device."""

from __future__ import annotations

import msgspec

from lingvo_gshard.api.partitioning import verify
from lingvo_gshard.tools.console import output, stages_on_terminal, startup
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.tools.flags.options import given_options, option_flags
from lingvo_gshard.tools.flags.planned import plan_flag, planned_training, requested_params
from lingvo_gshard.tools.flags.run import EXPERIMENT
from lingvo_gshard.wings.verification.experiment import VerifyOptions

NAME = "gshard-verify"
# Exit code of a comparison that found a difference. An error has exit code 1.
DIFFERENT = 2
# Exit code if nothing differs, but a part of the step was not compared.
NOT_VERIFIED = 3

define_flags = maker(
    **EXPERIMENT, plan=plan_flag(), **option_flags(VerifyOptions()), json=output.json_flag()
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake.

    The exit code is 0 if all tensors are equal, `DIFFERENT` if one is not, and `NOT_VERIFIED` if a
    part of the step was not compared.
    """
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    output.check_writable(values, "json")
    console = output.make_console(values.json)
    params = requested_params(values, planned_training(values), console.say)
    with stages_on_terminal() as stages:
        found = verify(params, progress=stages, **given_options(values, VerifyOptions))
    for line in found.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    record = {"equal": found.is_equal, "largest": found.largest.difference.relative}
    output.write_json(values.json, record | msgspec.to_builtins(found))
    if not found.is_equal:
        return DIFFERENT
    return NOT_VERIFIED if found.not_verified else 0
