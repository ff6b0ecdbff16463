"""Shows how a strategy splits an experiment over a mesh, and what its step then does.

    gshard-inspect --experiment=translation.quickstart --mesh=data=4,model=2 \\
        --strategy=expert_tensor

lists every weight: its letters, its shape, what it is split over, its bytes in all and on each
device. --slots lists the optimizer's moments as well; their totals are always there. Below stand
what every device holds whole although the strategy splits a letter of it, and axes over which
nothing is split. No device is needed for this, so the mesh may be as large as you like:

    gshard-inspect --experiment=translation.hundred_languages --mesh=data=16,model=8 \\
        --strategy=expert_tensor --slots --json=split.json

--compile lowers the real training step and has XLA partition and compile it for the mesh, on CPU
devices made virtually. It shows the memory that the step takes on each device, its collectives by
layer, kind, count and bytes, and each tensor that the partitioner had to make whole to change its
layout. Nothing is run:

    gshard-inspect --experiment=translation.quickstart --mesh=data=8 --strategy=expert --compile

--program saves the lowered step as one file that runs where only jax is installed; --function says
which function of the trainer is meant, here and by --compile:

    gshard-inspect --experiment=translation.quickstart --mesh=data=8 --strategy=expert \\
        --function=init_state --program=init_state.zip

No corpus is read: vocabularies are taken to be as large as the experiment asks for. The bytes of a
collective are those of its result on one device; one in a loop counts once. The JSON holds all of
it; --json alone prints it, and the tables then go to standard error.
"""

from __future__ import annotations

import rich.console
from absl import flags

from lingvo_gshard.api.backend import check_choices
from lingvo_gshard.core.config import names
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.flags import runtime
from lingvo_gshard.tools.flags.experiment import define_experiment_flags, experiment_params
from lingvo_gshard.tools.inspection import inspection, tables
from lingvo_gshard.training import experiments

NAME = "gshard-inspect"


def define_flags() -> flags.FlagValues:
    """Returns this program's flags."""
    values = flags.FlagValues()
    define_experiment_flags(values)
    runtime.define_partitioning_flags(values)
    flags.DEFINE_boolean(
        "slots", False, "Lists the optimizer's moments beside the weights.", flag_values=values
    )
    flags.DEFINE_boolean(
        "compile",
        False,
        "Compiles the function for the mesh and shows its memory and collectives.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "function",
        inspection.FUNCTIONS[0],
        f"What --compile compiles and --program saves: {', '.join(inspection.FUNCTIONS)}.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "program",
        None,
        "File to save the lowered function in, to be run under jax alone.",
        flag_values=values,
    )
    output.define_json_flag(values)
    return values


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = define_flags()
    startup.parse_flags(values, argv, __doc__)
    check_choices(values.partitioner, values.device_order)
    if values.function not in inspection.FUNCTIONS:
        hint = names.nearest(values.function, inspection.FUNCTIONS)
        raise ValueError(f"--function={values.function} is unknown. {hint}")
    params = experiment_params(values)
    mesh = experiments.requested_mesh(params, values.mesh, values.device_order)
    if mesh is None:
        raise ValueError("--mesh is missing, such as --mesh=data=4,model=2")
    partitioning = experiments.requested_partitioning(params, mesh, values.strategy)
    trainer = experiments.make_trainer(params)
    experiments.check_overrides(partitioning, trainer)
    console = output.make_console(values.json)
    split = inspection.split(trainer, partitioning)
    tables.print_split(console, params.name, partitioning, split, values.slots)
    pipelines = inspection.pipelines(trainer)
    tables.print_pipelines(console, pipelines)
    inspection.check_replicated(split, values.max_replicated_mb)
    record = {
        "experiment": params.name,
        **inspection.split_record(partitioning, split, values.slots),
    }
    record["pipelines"] = pipelines
    if values.compile or values.program:
        program = inspection.lower(
            values.function, params, trainer, partitioning, values.partitioner
        )
        if values.program:
            _save(program, values.program, console)
        if values.compile:
            step = inspection.compile_program(program, trainer.task)
            tables.print_compiled(console, step)
            record["compiled"] = inspection.compiled_record(step)
    output.write_json(values.json, record)
    return 0


def _save(program: Program, path: str, console: rich.console.Console) -> None:
    try:
        program.save(path)
    except OSError as error:
        raise ValueError(f"--program={path} cannot be written: {error.strerror}") from None
    tables.say(console, f"{program.name} for {program.mesh} saved in {path}")
