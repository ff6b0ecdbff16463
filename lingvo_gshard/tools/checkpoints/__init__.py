"""Lists, verifies, deletes and copies the checkpoints of a run."""

from lingvo_gshard.tools.console import subcommands

SUBCOMMANDS = {
    name: f"lingvo_gshard.tools.checkpoints.{name}" for name in ("list", "verify", "prune", "copy")
}


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake."""
    return subcommands.run(argv, __doc__, SUBCOMMANDS, __name__)
