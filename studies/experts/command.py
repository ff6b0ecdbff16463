"""Compares models with more and more experts: trains them, scores them, and tabulates the scores.

    python -m studies experts --folder=runs/study

trains experiments one after the other on prepared data (docs/data.md). All have equal active FLOPs
per token, and the same data, steps, batches and schedule. The command then scores each model on its
test rows. It prints perplexity and chrF by amount of training text and by family of languages. Each
run is a directory of --folder. The same command continues a study that was interrupted.

    python -m studies experts --folder=runs/study --models=study.dense,study.experts_32 --seeds=1,2
    python -m studies experts --folder=runs/study --bilingual=it,de,eo,ba,sw,fo
    python -m studies experts --folder=runs/study --max_rows_per_language=20
    python -m studies experts --folder=runs/mine --steps=1000 \\
        --gin_param='input.directory = "prepared/mine"'

--bilingual adds one model for each of some languages: the experiment study.bilingual, trained on
this language alone.

    perplexity   of the references; each token of a group of languages counts the same
    chrF         of beam search; each row of a group of languages counts the same
    most, middle, least text   the thirds of the languages, ordered by their training rows

If a model has several seeds, the table has the mean and, after ±, half the distance between the
largest and the smallest value. --notrain shows the runs that are finished, and trains nothing.
"""

from __future__ import annotations

import functools

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.console import output
from lingvo_gshard.wings.preparation.prepared import manifest as manifests
from studies.command import check, completed, define_study_flags, folder_of, seeds_of
from studies.experts import results
from studies.member import Member

MODELS = ("study.dense", "study.experts_8", "study.experts_32", "study.experts_128")
BILINGUAL = "study.bilingual"


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = flags.FlagValues()
    define_study_flags(values, ["1"])
    flags.DEFINE_list(
        "models", list(MODELS), "Experiments to compare, in this order.", flag_values=values
    )
    flags.DEFINE_list(
        "bilingual",
        [],
        f"Languages to train {BILINGUAL} on, a model for each, with the first seed.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "max_rows_per_language",
        None,
        "Scores a fixed random choice of at most this many test rows of each language; default: "
        "all.",
        1,
        flag_values=values,
    )
    return values


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Runs the study and returns the exit code. Raises UserError for a user's mistake."""
    members = _members(values)
    manifest = manifests.read(members[0].params().input.directory)
    found = results.read(completed(members, values, console), manifest)
    results.show(console, found)
    output.write_json(values.json, found)
    return 0


def _members(values: flags.FlagValues) -> list[Member]:
    """Returns the runs of the study, without training any. Raises ValueError for a wrong flag."""
    folder = folder_of(values)
    seeds = seeds_of("seeds", values.seeds)
    if not seeds or not values.models:
        raise UserError("--models and --seeds must each name one or more")
    most = values.max_rows_per_language
    make = functools.partial(
        Member,
        folder,
        settings=tuple(values.gin_param),
        gin_files=tuple(values.gin_file),
        steps=values.steps,
        score_options={"shuffled": False} | ({"max_rows_per_language": most} if most else {}),
    )
    members = [make(model, seed) for model in values.models for seed in seeds]
    members += [make(BILINGUAL, seeds[0], language=language) for language in values.bilingual]
    check(members)
    return members
