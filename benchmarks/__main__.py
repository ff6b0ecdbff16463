"""Measures parts of the library, and compares it with other engines.

    python -m benchmarks partition
    python -m benchmarks moe --json=moe.json
    python -m benchmarks depth --depths=6,48
    python -m benchmarks choices --num_layers=6
    python -m benchmarks serve --logdir=runs/quickstart --clients=300 --seconds=60
    python -m benchmarks decode --peers_python=peers/bin/python --json=decode.json
    python -m benchmarks input --rows=20000000 --workers=2 --json=input.json
    python -m benchmarks parity --peers_python=peers/bin/python --families=llama,mixtral
    python -m benchmarks agents --hosts=256 --days=30
    python -m benchmarks train --peers_python=peers/bin/python --minutes=10 --logdir=runs/quickstart

gshard-bench has the measurements of your own machine. The programs here belong to the source tree
and run in its top folder. Each has its own help: python -m benchmarks depth --help.

The JSON is {"device": ..., "rows": [...]}. A class in the benchmark's file describes
the fields of a row. --json alone writes the JSON to standard output and the table to standard
error.
"""

from __future__ import annotations

import sys

from lingvo_gshard.tools.console import launcher

NAME = "benchmarks"
SUBCOMMANDS = {
    "partition": "benchmarks.partition",
    "moe": "benchmarks.moe",
    "depth": "benchmarks.depth",
    "choices": "benchmarks.choices",
    "serve": "benchmarks.serve",
    "decode": "benchmarks.decode.command",
    "input": "benchmarks.input.command",
    "parity": "benchmarks.parity.command",
    "agents": "benchmarks.agents.command",
    "train": "benchmarks.train.command",
}


def main(argv: list[str]) -> int:
    """Runs the program and returns its exit code. Raises UserError for a user's mistake."""
    from lingvo_gshard.tools.console import subcommands

    return subcommands.run(argv, __doc__, SUBCOMMANDS, NAME)


if __name__ == "__main__":
    sys.exit(launcher.run(NAME, sys.argv, lambda: main))
