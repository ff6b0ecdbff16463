"""Compares the speed of decoding with CTranslate2 and with transformers.

    python -m benchmarks decode --peers_python=peers/bin/python --json=decode.json

decodes what `gshard-bench decode` decodes, with the engines of --peers_python in turn
(docs/decoding_speed.md). They decode the same batches with dense models of the same active FLOPs:

    ratio = our tokens per second / tokens per second of the other engine
"""

from __future__ import annotations

import contextlib
import os

import rich.console
from absl import flags

from benchmarks import common
from benchmarks.decode import sizes
from benchmarks.decode.peers import LIBRARIES, Peers
from benchmarks.peer_python import define_peer_flags, find_python
from lingvo_gshard.core.config import registry
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.bench import DECODED
from lingvo_gshard.tools.benchmarks.decode import measure
from lingvo_gshard.tools.console.stages import transient_stages
from lingvo_gshard.tools.flags.definitions import define


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = common.define_flags()
    define(values, **DECODED)
    define_peer_flags(values, "torch, transformers and ctranslate2")
    return values


def run(values: flags.FlagValues, console: rich.console.Console) -> int:
    """Measures, prints the table, writes the rows, and returns the exit code.

    Raises:
      UserError: there is no Python with the other engines.
    """
    python = find_python(values.peers_python, LIBRARIES)
    if not python:
        raise UserError(
            "the extra `peers` (torch, transformers, ctranslate2) is not installed; --peers_python "
            "names another Python that has it. `gshard-bench decode` measures our engine alone"
        )
    threads, rows = values.threads or len(os.sched_getaffinity(0)), []
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(transient_stages(console, "reading the test sentences"))
        models, cases = measure.make_cases(
            registry.get(values.experiment), registry.get(values.language_model), values.sentences
        )
        progress.begin("starting the other engines")
        dense = {name: sizes.dense_sizes(m.task, m.facts) for name, m in models.items()}
        peers = stack.enter_context(Peers(python, dense, cases, threads))
        for row in measure.measure(models, cases, peers, threads, values.repeats, progress):
            measure.show_row(console, row)
            rows.append(row)
    measure.print_table(console, rows)
    return common.write(values, rows, "CPU")
