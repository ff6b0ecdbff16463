"""Compares learning rates over widths, with standard initial values and with width scaling (muP).

    python -m studies widths --folder=runs/widths --widths=32,128 --rates=0.004,0.016,0.064

trains a language model of each width with each rate, as it is and with task.width_scaling for the
first width, and shows the mean training loss of the last fifth of the steps. Heads and the hidden
layer grow with --widths, which are sizes of M. All runs see the same batches. They train with Adam
unless --gin_param names another optimizer; width scaling has no rules for Muon. The same command
continues a study that was interrupted: a run that is finished is a line of --folder/losses.jsonl.

--notrain shows the runs that are finished, and trains nothing.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence

import numpy as np
from absl import flags

from lingvo_gshard.api import tables
from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.core import Params, UserError, tf
from lingvo_gshard.tasks.evaluation import Table
from lingvo_gshard.tools.console import Console, output
from lingvo_gshard.training.experiments import make_trainer
from studies.command import ADAM, define_study_flags, folder_of, seeds_of

STANDARD, SCALED = "standard", "width scaling"
_WARMUP_STEPS = 20


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = flags.FlagValues()
    define_study_flags(values, ["1"])
    name = "language_model.quickstart"
    flags.DEFINE_string("experiment", name, "Experiment to train.", flag_values=values)
    flags.DEFINE_list("widths", ["32", "128"], "Sizes of M, the base first.", flag_values=values)
    rates = ["0.002", "0.004", "0.008", "0.016", "0.032"]
    flags.DEFINE_list("rates", rates, "Learning rates.", flag_values=values)
    return values


def run(values: flags.FlagValues, console: Console) -> int:
    """Runs the study and returns the exit code. Raises UserError for a user's mistake."""
    folder, seeds = folder_of(values), seeds_of("seeds", values.seeds)
    widths = [int(number) for number in _numbers("widths", values.widths)]
    rates = _numbers("rates", values.rates)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "losses.jsonl"
    found = list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
    ways = [(STANDARD, width) for width in widths] + [(SCALED, width) for width in widths[1:]]
    for seed, (way, width) in itertools.product(seeds, ways):
        own = [f for f in found if (f["seed"], f["way"], f["width"]) == (seed, way, width)]
        missing = [rate for rate in rates if rate not in [each["rate"] for each in own]]
        if not values.train or not missing:
            continue
        params = _params(values, widths[0], width, way == SCALED)
        for rate, loss in _train(params, seed, values.steps or params.run.steps, missing):
            row = {"seed": seed, "way": way, "width": width, "rate": rate, "loss": loss}
            console.say(f"{way}, M = {width}: loss {loss:.3f} with {rate:g}")
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            found.append(row)
    tables.print_table(console, tables.rich_table(table(found, rates)))
    output.write_json(values.json, found)
    return 0


def table(found: Sequence[dict], rates: Sequence[float]) -> Table:
    """Returns the mean loss over seeds of each way and width, by learning rate."""
    rows = []
    for way, width in dict.fromkeys((each["way"], each["width"]) for each in found):
        row = [way, f"{width}"]
        for rate in rates:
            key = (way, width, rate)
            losses = [f["loss"] for f in found if (f["way"], f["width"], f["rate"]) == key]
            row.append(f"{np.mean(losses):.3f}" if losses else "-")
        rows.append(row)
    return Table(["initial values and rates", "M", *map("{:g}".format, rates)], rows)


def _numbers(flag: str, texts: Sequence[str]) -> list[float]:
    """Returns the numbers that a flag gives. Raises UserError if one is none, or there is none."""
    try:
        found = [float(text) for text in texts]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise UserError(f"--{flag}={','.join(texts)}: numbers above 0 were expected")
    return found


def _params(values: flags.FlagValues, base: int, width: int, is_scaled: bool) -> Params:
    """Returns the experiment with a model of one width."""
    settings = (ADAM, *values.gin_param)
    params = experiment(values.experiment, settings, tuple(values.gin_file))
    task = params.task
    model_dim, hidden, heads = task.model_dim, task.decoder.hidden_dim, task.decoder.num_heads

    def sizes(width: int) -> dict[str, int]:
        numbers = {"M": width, "H": hidden * width / model_dim, "N": heads * width / model_dim}
        if any(number % 1 for number in numbers.values()):
            raise UserError(f"--widths={width}: {heads} heads for M = {model_dim} do not shrink so")
        return {letter: int(number) for letter, number in numbers.items()}

    own, head = sizes(width), model_dim // heads
    task.model_dim = own["M"]
    task.decoder.set(hidden_dim=own["H"], num_heads=own["N"])
    if is_scaled:
        task.width_scaling.base_widths = {**sizes(base), "D": head}
        task.logit_scale = math.sqrt(base / width) if task.tie_softmax else 1.0
    return params


def _train(
    params: Params, seed: int, steps: int, rates: Sequence[float]
) -> Iterator[tuple[float, float]]:
    """Yields each rate with the mean loss of the last fifth of the steps; one compilation."""
    params.step.seed = seed
    input_ = params.input.instantiate()
    task = params.task.cls.with_vocabulary_sizes(params.task, input_.vocabulary_sizes())
    trainer = make_trainer(params, task)
    batches = list(itertools.islice(input_.train_batches(seed), steps))

    @tf.function(jit_compile=True, autograph=False)
    def step(state, batch, rate):
        def rising(number: tf.Tensor) -> tf.Tensor:
            return rate * tf.minimum(1.0, (tf.cast(number, tf.float32) + 1.0) / _WARMUP_STEPS)

        trainer.schedule = rising
        return trainer.train_step(state, batch)

    for rate in rates:
        state, losses = trainer.init_state(), []
        for batch in batches:
            arrays = {name: tf.constant(array) for name, array in batch.items()}
            state, metrics = step(state, arrays, tf.constant(rate))
            losses.append(float(metrics.loss))
        yield rate, float(np.mean(losses[-max(1, steps // 5) :]))
