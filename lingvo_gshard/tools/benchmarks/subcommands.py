"""The subcommands of gshard-bench that measure programs traced by TensorFlow."""

from __future__ import annotations

import itertools

import rich.console
from absl import flags

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.core.config import registry
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers import Sequential, TransformerStack
from lingvo_gshard.runtime import SingleDeviceRuntime
from lingvo_gshard.tools.benchmarks import moe, step
from lingvo_gshard.tools.benchmarks.decode import measure as decode
from lingvo_gshard.tools.benchmarks.step import make_directory, profile_case
from lingvo_gshard.tools.console.stages import transient_stages
from lingvo_gshard.tools.console.tables import make_table, print_rows, print_table


def print_step_table(console: rich.console.Console, rows: list[step.StepTiming]) -> None:
    """Prints the rows of `gshard-bench step`."""
    numbers = ("GFLOP", "seconds", "GFLOP/s", "product", "ratio", "compile")
    cells = [
        (
            row.name,
            f"{row.flops / 1e9:,.1f}",
            f"{row.seconds:.4f}",
            f"{row.flops / row.seconds / 1e9:,.1f}",
            f"{row.gemm_rate / 1e9:,.1f}",
            f"{row.ratio:.1%}",
            f"{row.compile_seconds:.1f}",
        )
        for row in rows
    ]
    caption = "ratio: to the rate of a matrix product"
    print_rows(console, ("training step",), numbers, cells, caption)


def print_moe_table(console: rich.console.Console, rows: list[moe.LayerTiming]) -> None:
    """Prints the rows of `gshard-bench moe`."""
    caption = "to dense: to the time of a dense layer of the same active FLOPs; routing: share of "
    caption += "all but the experts' products; GEMM: useful FLOPs to the rate of a matrix product; "
    caption += "MiB: of temporaries"
    numbers = ("capacity", "ms", "to dense", "routing", "GEMM", "dropped", "MiB")
    table = make_table("experts, dispatch, load", right=numbers, caption=caption)
    for _, group in itertools.groupby(rows, lambda row: row.experts):
        for row in group:
            table.add_row(
                f"{row.experts}, {row.dispatch}, {row.load}",
                f"{row.capacity_factor:g}" if row.capacity_factor else "-",
                f"{row.milliseconds:,.0f}",
                f"{row.ratio_to_dense:.2f}",
                f"{row.routing_share:.1%}",
                f"{row.gemm_ratio:.0%}",
                f"{row.dropped_share:.1%}",
                f"{row.temporary_bytes / 2**20:,.0f}",
            )
        table.add_section()
    print_table(console, table)


def run(
    subcommand: str, values: flags.FlagValues, console: rich.console.Console
) -> tuple[str, list]:
    """Runs a subcommand and prints its table; returns the kind of device and the rows."""
    measure, show = {
        "step": (measure_step, print_step_table),
        "moe": (measure_moe, print_moe_table),
        "decode": (decode.run, decode.print_table),
    }[subcommand]
    rows = measure(values, console)
    show(console, rows)
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU", rows


def measure_step(values: flags.FlagValues, console: rich.console.Console) -> list[step.StepTiming]:
    """Returns the rows of `gshard-bench step`."""
    experiment = registry.get(values.experiment)
    shape = whole_rows(values)
    cases = step.experiment_cases(experiment)
    cases += step.stack_cases(stack_params(values), experiment.step, *shape)
    directory = values.profile
    if directory:
        make_directory(directory)

    def profile(case: step.StepCase, runtime: SingleDeviceRuntime) -> None:
        profile_case(case, runtime, directory, console)

    with transient_stages(console, "starting") as progress:
        return step.measure(
            cases, values.repeats, values.gemm_size, progress, profile if directory else None
        )


def measure_moe(values: flags.FlagValues, console: rich.console.Console) -> list[moe.LayerTiming]:
    """Returns the rows of `gshard-bench moe`."""
    experts = numbers("experts", values.experts)
    sizes = moe.Sizes(values.model_dim, values.hidden_dim, values.tokens, values.group_size)
    with transient_stages(console, "starting") as progress:
        return moe.measure(sizes, experts, values.skew, values.repeats, values.gemm_size, progress)


def numbers(flag: str, given: list[str]) -> list[int]:
    """Returns the integers of a list flag; ValueError unless all are positive."""
    try:
        found = [int(number) for number in given]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"--{flag}={','.join(given)}: expected positive integers")
    return found


def whole_rows(values: flags.FlagValues) -> tuple[int, int]:
    """Returns rows and row length of a batch of --tokens; ValueError if they do not divide."""
    if values.tokens % values.row_length:
        raise UserError(
            f"--tokens={values.tokens} is not a multiple of --row_length={values.row_length}"
        )
    return values.tokens // values.row_length, values.row_length


def stack_params(values: flags.FlagValues) -> Params:
    """Returns the Params of the encoder alone; dropout is the paper's (arXiv 2006.16668)."""
    stack = TransformerStack.params().set(
        num_layers=values.num_layers,
        execution=Sequential.params().set(rematerialize=values.rematerialize),
        model_dim=values.model_dim,
        num_heads=values.num_heads,
        hidden_dim=values.hidden_dim,
        input_dropout_rate=0.1,
        residual_dropout_rate=0.1,
        attention_dropout_rate=0.1,
    )
    stack.moe.num_experts = values.num_experts
    return stack
