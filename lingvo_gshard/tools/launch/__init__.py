"""Starts a training on the hosts of a cluster, and starts it again when hosts fail."""

from lingvo_gshard.tools.console import subcommands
from lingvo_gshard.tools.launch.words import check_utf8

SUBCOMMANDS = {
    name: f"lingvo_gshard.tools.launch.{name}"
    for name in ("local", "slurm", "kubernetes", "ray", "tpu_vm", "agent")
}
_SEPARATOR = "--"


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake."""
    for word in argv:
        check_utf8(word)
    place = argv.index(_SEPARATOR) if _SEPARATOR in argv else len(argv)
    return subcommands.run(argv[:place], __doc__, SUBCOMMANDS, __name__, argv[place + 1 :])
