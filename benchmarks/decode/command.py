"""Measures the speed of decoding, and compares it with CTranslate2 and with transformers.

    python -m benchmarks decode --json=decode.json
    python -m benchmarks decode --peers_python=peers/bin/python --json=decode.json

measures how fast an experiment's model and --language_model generate tokens: with greedy and beam
search, for many test sentences and for one (docs/results.md). Weights are random, and every
text gets a fixed number of tokens. Values are medians of --repeats turns.

With --peers_python, or if the extra `peers` is installed, other engines decode the same batches in
turn. Their dense models have the same active FLOPs:

    ratio = our tokens per second / tokens per second of the other engine
"""

from __future__ import annotations

import contextlib
import os

from absl import flags

from benchmarks import common
from benchmarks.decode import measure, sizes
from benchmarks.decode.peers import LIBRARIES, Peers
from benchmarks.peer_python import define_peer_flags, find_python
from lingvo_gshard.core.config import registry
from lingvo_gshard.tools.console import Console, transient_stages
from lingvo_gshard.tools.flags.definitions import define, integer, string


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = common.define_flags()
    define(
        values,
        language_model=string("The second model.", "language_model.quickstart"),
        sentences=integer("Test sentences to translate.", 500, 1),
    )
    define_peer_flags(values, "torch, transformers and ctranslate2")
    return values


def run(values: flags.FlagValues, console: Console) -> int:
    """Measures, prints the table, writes the rows, and returns the exit code.

    Raises:
      UserError: --peers_python lacks an engine.
    """
    python = find_python(values.peers_python, LIBRARIES)
    if not python:
        console.print("Our engine alone: --peers_python names a Python with the extra `peers`.")
    threads, rows = values.threads or len(os.sched_getaffinity(0)), []
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(transient_stages(console, "reading the test sentences"))
        models, cases = measure.make_cases(
            registry.get(values.experiment), registry.get(values.language_model), values.sentences
        )
        peers = None
        if python:
            progress.begin("starting the other engines")
            dense = {name: sizes.dense_sizes(m.task, m.facts) for name, m in models.items()}
            peers = stack.enter_context(Peers(python, dense, cases, threads))
        for row in measure.measure(models, cases, peers, threads, values.repeats, progress):
            measure.show_row(console, row)
            rows.append(row)
    measure.print_table(console, rows)
    return common.write(values, rows, "CPU")
