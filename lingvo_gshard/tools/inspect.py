"""Shows how a strategy splits an experiment over a mesh, and how its step compiles."""

from __future__ import annotations

from typing import Any

import msgspec
from absl import flags

from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.core import Params, UserError, explained, names
from lingvo_gshard.runtime import devices_for
from lingvo_gshard.sharding import (
    HARDWARE,
    Mesh,
    Partitioning,
    PartitioningOptions,
    recording,
    sharding_tables,
)
from lingvo_gshard.tools.console import output, stages_on_terminal, startup
from lingvo_gshard.tools.flags.definitions import maker, string, switch
from lingvo_gshard.tools.flags.options import option_flags, read_options
from lingvo_gshard.tools.flags.planned import plan_flag, planned_training, requested_params
from lingvo_gshard.tools.flags.run import EXPERIMENT
from lingvo_gshard.tools.inspection import activations, compiler, inspection, tables, weights
from lingvo_gshard.training import Trainer, experiments

NAME = "gshard-inspect"

define_flags = maker(
    **EXPERIMENT,
    plan=plan_flag(),
    **weights.TRAINED_FLAGS,
    **option_flags(PartitioningOptions()),
    **option_flags(RuntimeOptions(), ("compilation_cache", "max_replicated_mb")),
    **compiler.FLAGS,
    slots=switch("Also lists the optimizer's moments."),
    compile=switch("Compiles the function for the mesh; shows its memory and collectives."),
    activations="Pattern of layers, such as 'decoder.layers[0]': compiles the function and "
    "shows the sharding of these layers' activations.",
    kernels=f"Platform, {' or '.join(HARDWARE)}, or {inspection.HERE} for the platform "
    "of this machine: lists the layers that use its kernels, and says why others use none.",
    placement="Pattern of paths, such as '*.w_in': shows which devices hold which part of "
    "these weights.",
    function=string(
        f"The function to list, compile or save: {', '.join(inspection.FUNCTIONS)}.",
        inspection.FUNCTIONS[0],
    ),
    program="File to save the lowered function to, which runs where only jax is installed.",
    json=output.json_flag(),
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake."""
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    asked = read_options(values, PartitioningOptions)
    names.check(values.function, inspection.FUNCTIONS, f"--function={values.function} is unknown")
    if values.kernels is not None:
        known = (*HARDWARE, inspection.HERE)
        names.check(values.kernels, known, f"--kernels={values.kernels} is unknown")
    compiler.check_flags(values)
    output.check_writable(values, "json", "program")
    if values.program == output.STANDARD_OUTPUT:
        raise UserError("--program=-: a program is written to a file, not to standard output")
    console = output.make_console(values.json)
    if values.logdir:
        params, trainer, record = weights.inspect(values, console)
    else:
        params = requested_params(values, planned_training(values), console.say)
        trainer, record = None, {}
    mesh = experiments.requested_mesh(params, asked.mesh, asked.device_order)
    if mesh is None and not values.logdir:
        raise UserError("--mesh is missing, such as --mesh=data=4,model=2")
    if mesh is not None:
        record |= _inspect_sharding(values, params, trainer, mesh, console)
    output.write_json(values.json, record)
    return 0


def _inspect_sharding(
    values: flags.FlagValues,
    params: Params,
    trainer: Trainer | None,
    mesh: Mesh,
    console: output.Console,
) -> dict[str, Any]:
    """Prints how an experiment or a trained run is split and compiled; returns the JSON record."""
    partitioning = experiments.requested_partitioning(params, mesh, values.strategy)
    partitioner = experiments.requested_partitioner(params, values.partitioner)
    if values.kernels and partitioner != "gspmd":
        raise UserError(
            f"--kernels={values.kernels}: programs of `partitioner=shardy` use no kernels"
        )
    with stages_on_terminal() as stages:
        stages.begin("Building the model")
        trainer = trainer or experiments.make_trainer(params)
        experiments.check_overrides(partitioning, trainer)
        if values.activations is not None:
            activations.check(values.activations, mesh, trainer.task.layer_paths())
        sharding = inspection.state_sharding(trainer, partitioning)
    tables.print_sharding(console, params.name, partitioning, sharding, values.slots)
    pipelines = inspection.pipelines(trainer)
    tables.print_pipelines(console, pipelines)
    if values.max_replicated_mb is not None:
        tensors = [*sharding.replicated_weights, *sharding.replicated_moments]
        sharding_tables.check_replicated(tensors, values.max_replicated_mb)
    record = {
        "experiment": params.name,
        **inspection.sharding_record(partitioning, sharding, values.slots),
        "pipelines": pipelines,
    }
    if values.placement is not None:
        record["placement"] = inspection.placements(trainer, partitioning, values.placement)
        tables.print_placements(console, record["placement"])
    if values.compile or values.program or values.activations is not None:
        record |= _compile(values, params, trainer, partitioning, partitioner, console)
    if values.kernels:
        # After compiling: jax, once started, adds no virtual devices.
        record["kernels"] = _list_kernels(values, params, trainer, partitioning, console)
    if values.compiler:
        record["compiler_options"] = compiler.list_options(values, console)
    return record


def _list_kernels(
    values: flags.FlagValues,
    params: Params,
    trainer: Trainer,
    partitioning: Partitioning,
    console: output.Console,
) -> dict[str, Any]:
    """Prints which layers of the function use kernels; returns the record for JSON."""
    with stages_on_terminal() as stages:
        stages.begin("Lowering")
        platform, uses = inspection.kernel_uses(
            values.function, values.kernels, params, trainer, partitioning
        )
    tables.print_kernels(console, values.function, platform, uses)
    return {"platform": platform, "layers": msgspec.to_builtins(uses)}


def _compile(
    values: flags.FlagValues,
    params: Params,
    trainer: Trainer,
    partitioning: Partitioning,
    partitioner: str,
    console: output.Console,
) -> dict[str, Any]:
    """Lowers, saves and compiles the function that was asked for."""
    with stages_on_terminal() as stages:
        # Lowering and saving start jax, which can add no virtual devices after that.
        is_compiled = values.compile or values.activations is not None
        devices = devices_for(partitioning.mesh.size) if is_compiled else []
        stages.begin("Lowering")
        with recording.record() as recorded:
            program = inspection.lower(values.function, params, trainer, partitioning, partitioner)
        if values.program:
            program = inspection.for_all_platforms(program, params, trainer, partitioning)
            with explained(f"--program={values.program} cannot be written", OSError):
                program.save(values.program)
            console.say(f"{program.name} for {program.mesh} saved in {values.program}")
        if not is_compiled:
            return {}
        stages.begin("Compiling")
        compiled = inspection.compile_program(program, recorded, trainer.task, devices)
    if values.activations is None:
        compiled = msgspec.structs.replace(compiled, activations=None)
    else:
        found = activations.select(compiled.activations, values.activations)
        activations.print_activations(console, found)
        compiled = msgspec.structs.replace(compiled, activations=found)
    if values.compile:
        tables.print_compiled(console, compiled)
        activations.print_reshardings(console, compiled.reshardings)
    return {"compiled": msgspec.to_builtins(compiled)}
