"""Lists, verifies, deletes and copies the checkpoints of a run.

    gshard-checkpoints list --logdir=runs/quickstart
    gshard-checkpoints verify --logdir=runs/quickstart
    gshard-checkpoints prune --logdir=runs/quickstart --keep=1
    gshard-checkpoints copy --logdir=runs/quickstart --output=gs://me/runs/kept

Each subcommand has its own help: gshard-checkpoints list --help.
"""

from lingvo_gshard.tools.console import subcommands

SUBCOMMANDS = {
    name: f"lingvo_gshard.tools.checkpoints.{name}" for name in ("list", "verify", "prune", "copy")
}


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake."""
    return subcommands.run(argv, __doc__, SUBCOMMANDS)
