"""Measures how fast programs run, compared with the device's rate for matrix products."""

from __future__ import annotations

from lingvo_gshard.core import UserError, names
from lingvo_gshard.tools.console import subcommands

NAME = "gshard-bench"
SUBCOMMANDS = {
    "step": "lingvo_gshard.tools.benchmarks.step",
    "exported": "lingvo_gshard.tools.benchmarks.saved",
    "fill": "lingvo_gshard.tools.benchmarks.card.fill",
    "card": "lingvo_gshard.tools.benchmarks.card.command",
    "input": "lingvo_gshard.tools.benchmarks.reading",
}


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake."""
    if argv[1:2] in (["decode"], ["moe"]):
        valid = names.nearest(argv[1], SUBCOMMANDS)
        raise UserError(
            f"the subcommand '{argv[1]}' is unknown. {valid} The repository has python -m "
            f"benchmarks {argv[1]}"
        )
    return subcommands.run(argv, __doc__, SUBCOMMANDS, __name__)
