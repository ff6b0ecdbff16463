"""Compares language models with more and more experts: trains them, scores them, tabulates.

    python -m studies texts --folder=runs/texts

trains experiments one after the other on prepared text (docs/experts.md says how to fetch and
prepare it). All have equal active FLOPs per token, and the same data, steps, batches and schedule.
The command then scores each model on the texts of test, and prints the perplexity of each kind of
text. A kind is a source of the prepared data. Each run is a directory of --folder. The same command
continues a study that was interrupted.

    python -m studies texts --folder=runs/texts --more_seeds=2 --json=texts.json
    python -m studies texts --folder=runs/mine --steps=1000 \\
        --gin_param='input.directory = "prepared/mine"'

--more_seeds trains the first and the last of --models with further seeds. If a model has several
seeds, the table has the mean and, after ±, half the distance between the largest and the smallest
value. --notrain shows the runs that are finished, and trains nothing.
"""

from __future__ import annotations

import functools

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.console import output
from lingvo_gshard.wings.preparation.prepared import manifest as manifests
from studies.command import check, completed, define_study_flags, folder_of, seeds_of
from studies.member import Member
from studies.texts import results

MODELS = (
    "study.text_dense",
    "study.text_experts_8",
    "study.text_experts_32",
    "study.text_experts_128",
)


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = flags.FlagValues()
    define_study_flags(values, ["1"])
    flags.DEFINE_list(
        "models", list(MODELS), "Experiments to compare, in this order.", flag_values=values
    )
    flags.DEFINE_list(
        "more_seeds", [], "Further seeds of the first and the last model.", flag_values=values
    )
    return values


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the study and returns the exit code. Raises UserError for a user's mistake."""
    members = _members(values)
    # A missing directory is told before the first model is trained.
    manifests.read(members[0].params().input.directory)
    found = results.read(completed(members, values, console))
    results.show(console, found)
    output.write_json(values.json, found)
    return 0


def _members(values: flags.FlagValues) -> list[Member]:
    """Returns the runs of the study, without training any. Raises ValueError for a wrong flag."""
    folder = folder_of(values)
    seeds = seeds_of("seeds", values.seeds)
    more = seeds_of("more_seeds", values.more_seeds)
    if not seeds or not values.models:
        raise UserError("--models and --seeds must each name one or more")
    make = functools.partial(
        Member,
        folder,
        settings=tuple(values.gin_param),
        gin_files=tuple(values.gin_file),
        steps=values.steps,
        score_options={"by_source": True},
    )
    ends = dict.fromkeys((values.models[0], values.models[-1]))
    names = [(model, seed) for model in values.models for seed in seeds]
    names += [(model, seed) for model in ends for seed in more]
    members = [make(model, seed) for model, seed in dict.fromkeys(names)]
    check(members)
    return members
