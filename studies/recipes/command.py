"""Compares ways to train one model, such as precisions or optimizers, over several seeds.

    python -m studies recipes --folder=runs/recipes --compare=precisions
    python -m studies recipes --folder=runs/recipes --compare=optimizers --steps=1000

trains both quickstarts in each way, with equal seeds, data and steps, and scores each run on its
dev split: perplexity of the references, and for translations chrF of greedy decoding. Beside it is
the perplexity of the last fifth of the training. Each run is a directory of --folder. The same
command continues a study that was interrupted.

    python -m studies recipes --folder=runs/mine --experiments=language_model.quickstart \\
        --way='base:' --way='slow: step.schedule.learning_rate = 1e-3'

--way names a way of your own, by the gin statements that make it, with ; between two. The first is
what the others are compared with. The same seed draws the same weights and batches in all ways, so
that differences are taken seed by seed.

--notrain shows the runs that are finished, and trains nothing.
"""

from __future__ import annotations

from absl import flags

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.console import Console, output
from studies.command import ADAM, check, completed, define_study_flags, folder_of, seeds_of
from studies.member import Member
from studies.recipes import results

EXPERIMENTS = ("translation.quickstart", "language_model.quickstart")
_ADAFACTOR = "step.optimizer = @lingvo_gshard.training.step.adafactor.Adafactor"
_MUON = "step.optimizer = @lingvo_gshard.wings.optimizers.muon.Muon"
# name of a comparison -> way -> gin statements. The first way is what others are compared with.
COMPARISONS = {
    "precisions": {
        **{name: (f"step.precision = '{name}'",) for name in ("bfloat16", "fp8")},
        "fp8_e4m3": ("step.precision = 'fp8'", "step.fp8.gradients = 'e4m3'"),
        "fp8_delayed": ("step.precision = 'fp8'", "step.fp8.delayed_scales = True"),
        **{name: (f"step.precision = '{name}'",) for name in ("fp8_blocks", "mxfp8", "int8")},
        "nvfp4": ("step.precision = 'nvfp4'",),
        # Without layers in bfloat16.
        "nvfp4_all": (
            "step.precision = 'nvfp4'",
            "step.nvfp4.first_share = 0.0",
            "step.nvfp4.last_share = 0.0",
        ),
        # Two runs that differ in the last digits at first drift apart by chance.
        "chance": ("step.precision = 'bfloat16'", "step.clip_norm = 1.0001"),
    },
    "optimizers": {
        "adam": (ADAM, "step.schedule.learning_rate = 0.004"),
        "adafactor": (_ADAFACTOR, "step.schedule.learning_rate = 0.004"),
        "muon": (_MUON, "step.optimizer.iterations = 3", "step.schedule.learning_rate = 0.01"),
    },
}


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = flags.FlagValues()
    define_study_flags(values, ["1", "2", "3"])
    flags.DEFINE_enum("compare", None, list(COMPARISONS), "What is compared.", flag_values=values)
    flags.DEFINE_multi_string(
        "way",
        [],
        "Compares this way, 'name: statement; statement'; or one of the comparison's names alone. "
        "Can be given several times.",
        flag_values=values,
    )
    flags.DEFINE_list("experiments", list(EXPERIMENTS), "Experiments to train.", flag_values=values)
    return values


def run(values: flags.FlagValues, console: Console) -> int:
    """Runs the study and returns the exit code. Raises UserError for a user's mistake."""
    members = _members(values)
    found = results.read(completed(members, values, console))
    results.show(console, found)
    output.write_json(values.json, found)
    return 0


def _members(values: flags.FlagValues) -> list[Member]:
    """Returns the runs of the study, seed by seed. Raises UserError for a wrong flag."""
    folder = folder_of(values)
    ways, seeds = _ways(values), seeds_of("seeds", values.seeds)
    if not seeds or not values.experiments:
        raise UserError("--experiments and --seeds must each name one or more")
    members = []
    runs = [(seed, model, way) for seed in seeds for model in values.experiments for way in ways]
    for seed, model, way in runs:
        settings = (*values.gin_param, *ways[way])
        member = Member(
            folder,
            model,
            seed,
            settings=settings,
            gin_files=tuple(values.gin_file),
            steps=values.steps,
            variant=way,
            split="dev",
            score_options=_score_options(model),
        )
        members.append(member)
    check(members)
    return members


def _score_options(model: str) -> dict[str, int | bool]:
    """Returns options of gshard-evaluate: translations are decoded greedily, the fastest way."""
    task = experiment(model).task.cls
    return {"shuffled": False, "beam_size": 1} if "shuffled" in task.EVALUATION_OPTIONS else {}


def _ways(values: flags.FlagValues) -> dict[str, tuple[str, ...]]:
    """Returns way -> gin statements. Raises UserError if none or a wrong one is given."""
    known = COMPARISONS.get(values.compare, {})
    if not values.way:
        if not known:
            raise UserError("--compare or --way is missing: what is compared")
        return known
    found = {}
    for text in values.way:
        name, has_statements, statements = text.partition(":")
        name = name.strip()
        if not has_statements and name not in known:
            raise UserError(
                f"--way={text!r} names no way of --compare; 'name: statement; statement' was "
                "expected"
            )
        if not name or any(not (letter.isalnum() or letter in "_.") for letter in name):
            raise UserError(f"--way={text!r}: a name of letters, digits, _ and . was expected")
        parts = (part.strip() for part in statements.split(";"))
        found[name] = tuple(filter(None, parts)) if has_statements else known[name]
    return found
