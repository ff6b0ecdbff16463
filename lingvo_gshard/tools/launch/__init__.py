"""Starts a training on the hosts of a cluster, and starts it again when hosts fail.

    gshard-launch local --hosts=2 -- gshard-train --experiment=translation.quickstart \\
        --logdir=runs/quickstart --mesh=data=2 --strategy=expert
    gshard-launch slurm --max_hosts=4 -- gshard-train ... --mesh=data=32

local runs all hosts on this machine. slurm writes a batch script, submits the script and follows
the log. kubernetes applies a JobSet. tpu_vm asks for a TPU of Google Cloud and uses its hosts. Each
host runs an agent. An agent starts a worker, the command after the two dashes, and watches it. When
a worker ends too early, the agents meet again, agree on who is there, and start workers again from
the newest checkpoint.

--dry_run shows what would be submitted. Each subcommand has its own help:
gshard-launch local --help. docs/clusters.md has a section for each kind of cluster.
"""

from lingvo_gshard.tools.console import subcommands
from lingvo_gshard.tools.launch.words import check_utf8

SUBCOMMANDS = {
    name: f"lingvo_gshard.tools.launch.{name}"
    for name in ("local", "slurm", "kubernetes", "tpu_vm", "agent")
}
_SEPARATOR = "--"


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake."""
    for word in argv:
        check_utf8(word)
    place = argv.index(_SEPARATOR) if _SEPARATOR in argv else len(argv)
    return subcommands.run(argv[:place], __doc__, SUBCOMMANDS, argv[place + 1 :])
