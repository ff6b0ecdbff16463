"""Says what training takes on machines you have not got: memory, communication, time and money.

    gshard-plan --experiment=gshard_paper.moe_512e_36l --topology=v3:16x16

lowers the real training step (forward, backward, optimizer), has the topology's own compiler
compile it ahead of time, and reports whether it fits, what fills the memory, every collective with
its layer and bytes, the arithmetic, and two times: a bound, from the chip's published figures, and
an estimate, from measured efficiencies of single operations. Nothing is run; a TPU's compiler is in
the package's extra `plan`, and every other topology is planned with XLA's compiler for CPUs.

    gshard-plan --list_topologies

shows the machines. Mesh and strategy are the experiment's own unless --mesh and --strategy say
otherwise; --tokens says what a whole training costs:

    gshard-plan --experiment=gshard_paper.moe_512e_36l --topology=v4:8x8x8 --tokens=1e12 \\
        --mesh=data=512 --strategy=expert_fsdp --json=plan.json --html=plan.html

If a step does not fit, changes that may help are tried, one on top of the other, until it does;
--remedies says how many. Plans are compared by

    gshard-plan diff before.json after.json

What to split, and over which axes, can be looked for:

    gshard-plan --experiment=gshard_paper.moe_512e_12l --topology=v3:16x16 --search

has a cost model look at every mesh, tables of letters for each group of layers, and policies of
rematerialization, compiles the best, and prints the flags to use.

The GShard paper's published figures stand beside ours, each experiment planned on its own cores, in

    gshard-plan --paper

which compiles 12 programs; --paper_rows=weights,steps_estimate takes some of the figures.

The JSON holds all of it; --json alone prints it, and the tables then go to standard error, where
what is being done stands in any case. Tokens are the target positions of a batch. The exit code is
0 whether a step fits or not, and 1 where there is no plan.
"""

from __future__ import annotations

import dataclasses
import math

import rich.console
from absl import flags

from lingvo_gshard.api.backend import check_choices
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.planning import picture
from lingvo_gshard.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.planning.machines import topologies
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.plan import diff
from lingvo_gshard.planning.search.experiment_search import search_experiment
from lingvo_gshard.planning.suggestions import suggest
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.console.stages import Stages
from lingvo_gshard.tools.flags import runtime
from lingvo_gshard.tools.flags.experiment import define_experiment_flags, experiment_params
from lingvo_gshard.tools.plan_tools import paper, search, tables

NAME = "gshard-plan"
DIFF = "diff"
_DIFF_FLAGS = ("json", "allow_other_versions")


def define_flags() -> flags.FlagValues:
    """Returns this program's flags."""
    values = flags.FlagValues()
    define_experiment_flags(values)
    flags.DEFINE_string(
        "topology",
        None,
        "The machine: a slice of a TPU pod such as v3:32x32, cpu:N, or gpu:h100:8x4 for 8 hosts "
        "of 4 GPUs. --list_topologies shows what there is.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "list_topologies", False, "Shows the machines that can be planned for.", flag_values=values
    )
    runtime.define_splitting_flags(values)
    flags.DEFINE_float(
        "tokens", None, "Tokens to train on in all, to say what they cost.", 0.0, flag_values=values
    )
    flags.DEFINE_integer(
        "remedies",
        3,
        "How many changes are tried, each a compilation, where the step does not fit.",
        0,
        flag_values=values,
    )
    output.define_json_flag(values, "the plan")
    flags.DEFINE_string(
        "html", None, "File for the plan as a page to look at in a browser.", flag_values=values
    )
    search.define_search_flags(values)
    paper.define_paper_flags(values)
    flags.DEFINE_boolean(
        "allow_other_versions",
        False,
        "Compares plans by `diff` although other versions made them.",
        flag_values=values,
    )
    return values


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = define_flags()
    compared, argv = _compared(argv)
    startup.parse_flags(values, argv, __doc__)
    console = output.make_console(values.json, values.html)
    _check_files(values)
    if values.tokens is not None and not 0 < values.tokens < math.inf:
        raise ValueError(f"--tokens={values.tokens} is no number of tokens; expected such as 1e12")
    if compared:
        return _diff(compared, values, console)
    if values.list_topologies:
        console.print(topologies.listing(), markup=False, highlight=False)
        return 0
    if values.paper or values.paper_rows:
        return _paper(values, console)
    params = experiment_params(values)
    if not values.topology:
        raise ValueError("--topology is missing, such as v3:32x32; --list_topologies shows all")
    topology = topologies.get(values.topology)
    check_choices(values.partitioner, values.device_order)
    if values.search:
        return _search(values, params, topology, console)
    options = plan_options(values)
    with Stages() as shown:
        record = plan_experiment(params, topology, options, shown.begin).to_json()
        if not record["fits"]:
            record["remedies"] = suggest(
                params, topology, options, values.remedies, shown.say, shown.begin
            )
    tables.print_plan(record, console)
    output.write_json(values.json, record)
    if values.html:
        output.write_text(values.html, picture.to_html(record), "html")
    return 0


def plan_options(values: flags.FlagValues) -> PlanOptions:
    """Returns the options that the flags give."""
    return PlanOptions(
        mesh=values.mesh,
        strategy=values.strategy,
        device_order=values.device_order,
        partitioner=values.partitioner,
        tokens=values.tokens,
    )


def _compared(argv: list[str]) -> tuple[list[str], list[str]]:
    """The files that `diff` is to compare, [] without it, and the arguments without them."""
    if argv[1:2] != [DIFF]:
        return [], argv
    compared = [argument for argument in argv[2:] if not argument.startswith("--")]
    rest = [argument for argument in argv[2:] if argument.startswith("--")]
    if len(compared) != 2 and not set(rest) & {"--help", "-h"}:
        raise ValueError(f"{NAME} {DIFF} takes two plans that --json wrote, not {len(compared)}")
    return compared, [argv[0], *rest]


def _diff(compared: list[str], values: flags.FlagValues, console: rich.console.Console) -> int:
    for name in values:
        if values[name].present and name not in _DIFF_FLAGS:
            valid = " and ".join(f"--{flag}" for flag in _DIFF_FLAGS)
            raise ValueError(f"--{name}={values[name].value} is none of {DIFF}'s flags, {valid}")
    before, after = (diff.load(path) for path in compared)
    changes = diff.diff(
        before, after, allow_other_versions=values.allow_other_versions, names=tuple(compared)
    )
    tables.print_diff(changes, console)
    rows = [{**dataclasses.asdict(change), "ratio": change.ratio} for change in changes]
    output.write_json(values.json, rows)
    return 0


def _search(
    values: flags.FlagValues, params: Params, topology: Topology, console: rich.console.Console
) -> int:
    search.check_flags(values)
    with Stages() as shown:
        found = search_experiment(
            params,
            topology,
            values.search_compilations,
            values.partitioner,
            shown.say,
            shown.begin,
        )
    search.print_found(found, console)
    if found.plan:
        tables.print_plan(found.plan.to_json(), console)
    output.write_json(values.json, search.to_json(found))
    if values.html and found.plan:
        output.write_text(values.html, picture.to_html(found.plan.to_json()), "html")
    return 0 if found.result.best else 1


def _paper(values: flags.FlagValues, console: rich.console.Console) -> int:
    check_choices(values.partitioner, values.device_order)
    paper.check_flags(values)
    record = paper.compare(values.paper_rows, plan_options(values), plan_experiment, console)
    paper.print_comparison(record, console)
    output.write_json(values.json, record)
    return paper.exit_code(record)


def _check_files(values: flags.FlagValues) -> None:
    """Raises ValueError, before anything long begins, if a file cannot be written."""
    if values.json == values.html == output.STANDARD_OUTPUT:
        raise ValueError("--json=- and --html=-: standard output takes one of them")
    for flag in ("json", "html"):
        output.check_writable(values[flag].value, flag)
