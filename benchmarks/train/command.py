"""Trains the quickstart's text with other libraries, and compares the translations.

    python -m benchmarks train --peers_python=peers/bin/python --minutes=10 --threads=2 \\
        --logdir=runs/quickstart --json=train.json

trains on the rows of `translation.quickstart`, ten languages to English, with each of --libraries
and --settings (benchmarks/train/settings.py) for --minutes. Each library translates the test rows
with its own beam search, and the translations are scored as gshard-evaluate scores ours. Only
steps count as time, not reading, vocabularies, compilation or translating.

Our row describes --logdir: a run, or several runs with different seeds. gshard-train writes each,
and gshard-evaluate scores it:

    gshard-train --experiment=translation.quickstart --logdir=runs/quickstart
    gshard-evaluate --logdir=runs/quickstart

The Python of the other libraries, with a PyTorch for CPUs:

    pip install torch transformers accelerate joeynmt importlib_metadata sentencepiece==0.2.1
"""

from __future__ import annotations

import itertools
import os
import pathlib
import tempfile

from absl import flags

from benchmarks import common
from benchmarks.peer_python import define_peer_flags, find_python
from benchmarks.train import measure, settings
from benchmarks.train.peers import Peers
from lingvo_gshard.core.config import names, registry
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.console import Console, transient_stages
from lingvo_gshard.tools.flags.definitions import comma_list, decimal, define


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = common.define_flags(experiment=False)
    define(
        values,
        logdir=comma_list("Runs of gshard-train that differ by their seeds.", []),
        minutes=decimal("Time of each training's steps.", 10.0, 0.01),
        libraries=comma_list("Libraries to train with.", list(settings.MODULES)),
        settings=comma_list("Settings of each library.", list(settings.NAMES)),
        seeds=comma_list("Seeds of each library, a training for each.", ["1"]),
    )
    define_peer_flags(values, "torch, transformers, accelerate and joeynmt")
    return values


def run(values: flags.FlagValues, console: Console) -> int:
    """Trains, prints the table, writes the trainings, and returns the exit code.

    Raises:
      UserError: a name is unknown, a run lacks scores, or there is no Python with the libraries.
    """
    chosen, seeds = chosen_settings(values), common.numbers("seeds", values.seeds)
    modules = [module for each in chosen for module in settings.MODULES[each.library]]
    python = find_python(values.peers_python, list(dict.fromkeys(modules)))
    if not python and not values.logdir:
        raise UserError(
            f"train compares with {' and '.join(values.libraries)}, not all of which are "
            "installed: --peers_python names a Python that has them"
        )
    threads, rows = values.threads or len(os.sched_getaffinity(0)), []
    with (
        tempfile.TemporaryDirectory(prefix="gshard-train-") as folder,
        transient_stages(console, "reading the text") as progress,
    ):
        input_ = registry.get("translation.quickstart").input.instantiate()
        text = {split: input_.rows(split) for split in ("train", "dev", "test")}
        for logdir in values.logdir:
            progress.begin(f"reading {logdir}")
            rows.append(measure.read_training(logdir, text["train"], len(text["test"])))
        if python:
            progress.begin("training the vocabulary")
            peers = Peers(pathlib.Path(folder), text)
            for setting, seed in itertools.product(chosen, seeds):
                name = f"{setting.library}, {setting.name}, seed {seed}"
                progress.begin(f"{name}: {values.minutes:g} minutes of training")
                rows.append(peers.train(python, setting, values.minutes, seed, threads))
                console.print(f"{name}: chrF {rows[-1].chrf:.1f}")
    if not python:
        console.print("Our row alone: --peers_python names a Python with the other libraries.")
    measure.print_table(console, rows)
    return common.write(values, rows, "CPU")


def chosen_settings(values: flags.FlagValues) -> list[settings.Setting]:
    """Returns the settings of --libraries and --settings.

    Raises:
      UserError: a name is unknown.
    """
    for flag, known in (("libraries", list(settings.MODULES)), ("settings", settings.NAMES)):
        for name in getattr(values, flag):
            names.check(name, known, f"--{flag}={name} is unknown")
    return [
        each
        for each in settings.SETTINGS
        if each.library in values.libraries and each.name in values.settings
    ]
