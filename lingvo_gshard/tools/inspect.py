"""Shows how a strategy splits an experiment over a mesh, and how its step compiles.

This command lists each weight with its layout, shape, split, and its bytes in total and per device:

    gshard-inspect --experiment=translation.quickstart --mesh=data=4,model=2 \\
        --strategy=expert_tensor

--slots lists the optimizer's moments as well; their totals are always shown. Two warnings follow
the list: weights that every device holds in full although the strategy splits one of their
dimensions, and mesh axes over which nothing is split. No device is needed, so the mesh may be as
large as you like:

    gshard-inspect --experiment=translation.hundred_languages --mesh=data=16,model=8 \\
        --strategy=expert_tensor --slots --json=split.json

--compile lowers the training step and has XLA partition and compile it for the mesh, on virtual CPU
devices. It shows the step's memory per device, its collectives by layer, phase and kind, and each
tensor that the partitioner has to replicate in full to reshard it. Nothing is executed:

    gshard-inspect --experiment=translation.quickstart --mesh=data=8 --strategy=expert --compile

Collectives are counted twice: "in program", where one in a loop counts once, and "per step", where
it counts in each iteration. Bytes are those of one device's operand or result, whichever is larger.

--program saves the lowered step to one file that runs where only jax is installed. --function
chooses the function of the trainer that --compile and --program take:

    gshard-inspect --experiment=translation.quickstart --mesh=data=8 --strategy=expert \\
        --function=init_state --program=init_state.zip

No corpus is read: vocabularies have the size that the experiment asks for. --json=FILE writes
everything as JSON; --json alone prints it, and sends the tables to standard error.
"""

from __future__ import annotations

import msgspec
import rich.console
from absl import flags

from lingvo_gshard.api.backend import check_choices
from lingvo_gshard.core.config import names
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.console.terminal_progress import stages_on_terminal
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
    flags.DEFINE_boolean("slots", False, "Also lists the optimizer's moments.", flag_values=values)
    flags.DEFINE_boolean(
        "compile",
        False,
        "Compiles the function for the mesh; shows its memory and collectives.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "function",
        inspection.FUNCTIONS[0],
        f"The function to compile or save: {', '.join(inspection.FUNCTIONS)}.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "program",
        None,
        "File to save the lowered function to, which runs where only jax is installed.",
        flag_values=values,
    )
    output.define_json_flag(values)
    return values


def main(argv: list[str]) -> int:
    """Runs the command.

    Args:
      argv: the command line, the command's name first.

    Returns:
      the exit code.

    Raises:
      ValueError: for a mistake of the user.
    """
    values = define_flags()
    startup.parse_flags(values, argv, __doc__)
    check_choices(values.partitioner, values.device_order)
    if values.function not in inspection.FUNCTIONS:
        hint = names.nearest(values.function, inspection.FUNCTIONS)
        raise ValueError(f"--function={values.function} is unknown. {hint}")
    output.check_writable(values, "json", "program")
    if values.program == output.STANDARD_OUTPUT:
        raise ValueError("--program=-: a program is written to a file, not to standard output")
    params = experiment_params(values)
    mesh = experiments.requested_mesh(params, values.mesh, values.device_order)
    if mesh is None:
        raise ValueError("--mesh is missing, such as --mesh=data=4,model=2")
    partitioning = experiments.requested_partitioning(params, mesh, values.strategy)
    console = output.make_console(values.json)
    with stages_on_terminal() as stages:
        stages.begin("Building the model")
        trainer = experiments.make_trainer(params)
        experiments.check_overrides(partitioning, trainer)
        sharding = inspection.state_sharding(trainer, partitioning)
    tables.print_sharding(console, params.name, partitioning, sharding, values.slots)
    pipelines = inspection.pipelines(trainer)
    tables.print_pipelines(console, pipelines)
    inspection.check_replicated(sharding, values.max_replicated_mb)
    record = {
        "experiment": params.name,
        **inspection.sharding_record(partitioning, sharding, values.slots),
    }
    record["pipelines"] = pipelines
    if values.compile or values.program:
        with stages_on_terminal() as stages:
            # Lowering and saving start jax, which can add no virtual devices after that.
            devices = devices_for(mesh.size) if values.compile else []
            stages.begin("Lowering")
            program = inspection.lower(
                values.function, params, trainer, partitioning, values.partitioner
            )
            if values.program:
                _save(program, values.program, console)
            if values.compile:
                stages.begin("Compiling")
                compiled = inspection.compile_program(program, trainer.task, devices)
                stages.pause()
                tables.print_compiled(console, compiled)
                record["compiled"] = msgspec.to_builtins(compiled)
    output.write_json(values.json, record)
    return 0


def _save(program: Program, path: str, console: rich.console.Console) -> None:
    try:
        program.save(path)
    except OSError as error:
        raise ValueError(f"--program={path} cannot be written: {error.strerror}") from None
    tables.say(console, f"{program.name} for {program.mesh} saved in {path}")
