"""Reports on the experts of a trained model, and adds, prunes or places experts."""

from lingvo_gshard.tools.console import subcommands

SUBCOMMANDS = {
    name: f"lingvo_gshard.tools.experts.{name}"
    for name in ("report", "watched", "upcycle", "prune", "place")
}


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake."""
    return subcommands.run(argv, __doc__, SUBCOMMANDS, __name__)
