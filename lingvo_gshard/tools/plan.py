"""Plans training on machines that you do not have: memory, communication, time and money."""

from __future__ import annotations

import functools
import math

import msgspec
from absl import flags

from lingvo_gshard.api.importing import open_model
from lingvo_gshard.core import Params, UserError
from lingvo_gshard.tools.console import output, stages_with_lines, startup, with_flags
from lingvo_gshard.tools.flags import goodput, program
from lingvo_gshard.tools.flags.definitions import integer, maker, refuse, string, switch
from lingvo_gshard.tools.flags.options import option_flags, read_options
from lingvo_gshard.tools.flags.run import EXPERIMENT, IGNORE_KEYS, experiment_params
from lingvo_gshard.tools.plan_reports import (
    diff_report,
    goodput_report,
    loads_report,
    page_server,
    plan_report,
    search_report,
)
from lingvo_gshard.wings.planning import picture
from lingvo_gshard.wings.planning.experiments import PlanOptions, published_rows
from lingvo_gshard.wings.planning.generation import GenerationOptions, plan_generation
from lingvo_gshard.wings.planning.largest_batch import LargestBatch, plan_largest_batch
from lingvo_gshard.wings.planning.loads.rating import LoadsOptions
from lingvo_gshard.wings.planning.machines import cloud_names, topologies
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import Plan, load
from lingvo_gshard.wings.planning.programs.planned import plan_file
from lingvo_gshard.wings.planning.remedies import plan_to_fit
from lingvo_gshard.wings.planning.search.experiment_search import SearchOptions
from lingvo_gshard.wings.planning.search.machines import search_machines
from lingvo_gshard.wings.planning.training.budget.search import plan_budget
from lingvo_gshard.wings.planning.training.goodput import plan_training

NAME = "gshard-plan"


define_flags = maker(
    **EXPERIMENT,
    topology="The machine: a slice of a TPU pod such as v3:32x32, four slices such as "
    "v5p:8x8x8*4, cpu:N, or gpu:h100:8x4 for 8 hosts with 4 GPUs each; or a cloud's name: "
    f"{cloud_names.EXAMPLES}. --list_topologies lists all machines. "
    "With --budget and --search, several that are separated by commas.",
    list_topologies=switch("Lists the machines that can be planned for."),
    config="config.json of a published model, or its directory, in place of --experiment. A batch "
    "has 8 rows, or as many as the mesh splits evenly, unless input.batch_rows is set.",
    length=integer(
        "Positions of a row, with --config; 0: those that the model was made for, 1,024 at most.",
        0,
        0,
    ),
    precision=string(
        "Types of weights and activations, with --config, as step.precision; with --generate "
        f"{program.PRECISION} unless given.",
        "float32",
    ),
    ignore_keys=IGNORE_KEYS,
    **program.GENERATION_FLAGS,
    **goodput.GOODPUT_FLAGS,
    **goodput.BUDGET_FLAGS,
    **option_flags(LoadsOptions()),
    **option_flags(PlanOptions()),
    **program.COMPILING_FLAGS,
    remedies=integer(
        "Maximum number of changes to try if the step does not fit. Each takes one compilation.",
        3,
        0,
    ),
    json=output.json_flag("the plan"),
    html="HTML file to write the plan to, for a browser.",
    **program.program_flags(),
    **search_report.SEARCH_FLAGS,
    **page_server.PAGE_FLAGS,
    **diff_report.DIFF_FLAGS,
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = define_flags()
    path, argv = program.program_path(argv, [diff_report.DIFF])
    compared, argv = diff_report.compared_files(argv)
    startup.parse_flags(values, argv, __doc__, __name__)
    console = output.make_console(values.json, values.html)
    output.check_writable(values, "json", "html")
    if values.tokens is not None and not 0 < values.tokens < math.inf:
        raise UserError(f"--tokens={values.tokens}: expected a number of tokens, such as 1e12")
    if compared:
        return diff_report.run(compared, values, console)
    if values.serve:
        return page_server.run(values)
    if values.list_topologies:
        console.say(topologies.listing())
        output.write_json(values.json, topologies.records())
        return 0
    read_options(values, PlanOptions)
    program.check_generation_flags(values)
    program.check_program_flags(values, path)
    goodput.check_goodput_flags(values)
    goodput.check_budget_flags(values)
    program.check_loads_flags(values)
    if values.budget is not None:
        found = plan_budget(goodput.budget_options(values), goodput.budget_machines(values))
        goodput_report.print_budget(found, console)
        output.write_json(values.json, found)
        return 0
    with program.using_flags(values, console):
        return _planned(values, path, console)


def _planned(values: flags.FlagValues, path: str | None, console: output.Console) -> int:
    """Plans what the flags say. Returns the exit code."""
    if values.plan:
        return _report(values, load(values.plan), console)
    params = None if path else planned_params(values)
    if not values.topology:
        raise UserError("--topology is missing, such as v3:32x32; --list_topologies shows all")
    if params is not None and values.search:
        machines = [topologies.get(name) for name in values.topology.split(",")]
        return _search(values, params, machines, console)
    topology = topologies.get(values.topology)
    if params is None:
        with stages_with_lines(topology.compiler_choice) as shown:
            facts = program.program_facts(values)
            plan = plan_file(path or "", topology, facts, values.tokens, shown)
        return _report(values, plan, console)
    run = _generate if values.generate else _plan
    return run(values, params, topology, console)


def planned_params(values: flags.FlagValues) -> Params:
    """Returns the Params of --experiment or --config, with all settings."""
    if values.config is None:
        why = "applies to --config, which is not given; an experiment sets it by --gin_param"
        refuse(values, ("length", "precision", "ignore_keys"), why)
        return experiment_params(values)
    if values.experiment:
        raise UserError(
            f"--config={values.config} and --experiment={values.experiment} both say what to plan; "
            "give one of them"
        )
    is_narrow = values.generate and not values["precision"].present
    opened = functools.partial(
        open_model,
        values.config,
        length=values.length,
        precision=program.PRECISION if is_narrow else values.precision,
        settings=values.gin_param,
        gin_files=values.gin_file,
        ignore_keys=values.ignore_keys,
    )
    if values.generate or not values.topology:
        return opened()
    machines = [topologies.get(name) for name in values.topology.split(",")]
    return opened(rows=published_rows(opened(), machines, plan_options(values), values.search))


def plan_options(values: flags.FlagValues) -> PlanOptions:
    """Returns the options that the flags give."""
    return read_options(values, PlanOptions, loads=read_options(values, LoadsOptions))


def _plan(
    values: flags.FlagValues, params: Params, topology: Topology, console: output.Console
) -> int:
    options = plan_options(values)
    with stages_with_lines(topology.compiler_choice) as shown:
        answer = plan_to_fit(params, topology, options, values.remedies, shown)
    if answer.problem:
        console.say(f"As asked, there is no plan: {with_flags(answer.problem)}\n")
    return _report(values, answer.plan, console)


def _report(values: flags.FlagValues, plan: Plan, console: output.Console) -> int:
    """Prints and writes the plan of a step, and of the whole training if it is asked for."""
    if values.goodput:
        found = plan_training(plan, goodput.job_options(values))
        plan = msgspec.structs.replace(plan, goodput=found)
    plan_report.print_plan(plan, console)
    output.write_json(values.json, plan)
    if values.html:
        output.write_text(values.html, picture.to_html(plan), "html")
    return 0


def _generate(
    values: flags.FlagValues, params: Params, topology: Topology, console: output.Console
) -> int:
    asked, options = read_options(values, GenerationOptions), plan_options(values)
    with stages_with_lines(topology.compiler_choice) as shown:
        plan = plan_largest_batch if values.largest_batch else plan_generation
        found = plan(params, topology, options, asked, shown)
    if isinstance(found, LargestBatch):
        loads_report.print_largest_batch(found, console)
    else:
        loads_report.print_generation(found, console)
    output.write_json(values.json, found)
    return 0


def _search(
    values: flags.FlagValues, params: Params, machines: list[Topology], console: output.Console
) -> int:
    search_report.check_flags(values)
    with stages_with_lines(machines[0].compiler_choice) as shown:
        searches = search_machines(
            params,
            machines,
            read_options(values, SearchOptions),
            shown,
            values.partitioner,
            values.compile_options,
        )
    found = searches[0]
    search_report.print_machines(console, searches)
    is_file = values.json not in (None, output.STANDARD_OUTPUT)
    search_report.print_search(found, console, values.json if is_file else None)
    if found.plan:
        plan_report.print_plan(found.plan, console)
    output.write_json(values.json, search_report.to_record(searches))
    if values.html and found.plan:
        output.write_text(values.html, picture.to_html(found.plan), "html")
    return 0 if found.result.best else 1
