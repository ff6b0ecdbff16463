"""The subcommands of gshard-bench whose steps TensorFlow traces, and their tables."""

from __future__ import annotations

import rich.box
import rich.console
import rich.table
import tensorflow as tf
from absl import flags

from lingvo_gshard import params as experiments  # noqa: F401
from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.stacks.sequential import Sequential
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.tools.benchmarks import choices, depth, moe, partition, step


def run(
    subcommand: str, values: flags.FlagValues, console: rich.console.Console
) -> tuple[str, list]:
    """Measures and prints; returns the kind of device and the rows."""
    measure, show = {
        "step": (measure_step, print_step_table),
        "partition": (measure_partition, print_partition_table),
        "moe": (measure_moe, print_moe_table),
        "depth": (measure_depth, print_depth_table),
        "choices": (measure_choices, print_choices_table),
    }[subcommand]
    rows = measure(values, console)
    show(console, rows)
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU", rows


def measure_step(values: flags.FlagValues, console: rich.console.Console) -> list[step.Row]:
    """Returns the rows of `gshard-bench step`."""
    experiment = registry.get(values.experiment)
    shape = whole_rows(values)
    cases = step.experiment_cases(experiment)
    cases += step.stack_cases(stack_params(values), experiment.trainer, *shape)
    with console.status("starting") as status:
        return step.measure(cases, values.repeats, values.gemm_size, status.update)


def measure_partition(
    values: flags.FlagValues, console: rich.console.Console
) -> list[partition.Row]:
    """Returns the rows of `gshard-bench partition`."""
    case = step.experiment_cases(registry.get(values.experiment))[0]
    with console.status("starting") as status:
        return partition.measure(case, values.repeats, status.update)


def measure_moe(values: flags.FlagValues, console: rich.console.Console) -> list[moe.Row]:
    """Returns the rows of `gshard-bench moe`."""
    experts = numbers("experts", values.experts)
    sizes = moe.Sizes(values.model_dim, values.hidden_dim, values.tokens, values.group_size)
    with console.status("starting") as status:
        return moe.measure(
            sizes, experts, values.skew, values.repeats, values.gemm_size, status.update
        )


def measure_depth(values: flags.FlagValues, console: rich.console.Console) -> list[depth.Row]:
    """Returns the rows of `gshard-bench depth`."""
    depths, shape = numbers("depths", values.depths), whole_rows(values)
    trainer = registry.get(values.experiment).trainer
    with console.status("starting") as status:
        return depth.measure(
            stack_params(values), trainer, depths, *shape, values.repeats, status.update
        )


def measure_choices(values: flags.FlagValues, console: rich.console.Console) -> list[choices.Row]:
    """Returns the rows of `gshard-bench choices`."""
    experiment = registry.get(values.experiment)
    rows = []
    with console.status("starting") as status:
        for row in choices.measure(experiment, values.num_layers, values.repeats, status.update):
            console.print(f"{row.name}: {row.seconds:.3f} s")
            rows.append(row)
    return rows


def numbers(flag: str, given: list[str]) -> list[int]:
    """Returns the numbers that a flag lists; ValueError if it lists something else, or nothing."""
    try:
        found = [int(number) for number in given]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"--{flag}={','.join(given)}: numbers from 1 on were expected")
    return found


def whole_rows(values: flags.FlagValues) -> tuple[int, int]:
    """Returns rows and length of a batch of --tokens; ValueError if they are no whole rows."""
    if values.tokens % values.row_length:
        raise ValueError(
            f"--tokens={values.tokens} are no whole rows of --row_length={values.row_length}"
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


def print_step_table(console: rich.console.Console, rows: list[step.Row]) -> None:
    """Prints the rows for a person."""
    table = _table(
        "ratio: to the rate of a matrix product",
        "training step",
        "GFLOP",
        "seconds",
        "GFLOP/s",
        "product",
        "ratio",
        "compile",
    )
    for row in rows:
        table.add_row(
            row.name,
            f"{row.flops / 1e9:,.1f}",
            f"{row.seconds:.4f}",
            f"{row.flops / row.seconds / 1e9:,.1f}",
            f"{row.gemm_rate / 1e9:,.1f}",
            f"{row.ratio:.1%}",
            f"{row.compile_seconds:.1f}",
        )
    console.print(table)


def print_partition_table(console: rich.console.Console, rows: list[partition.Row]) -> None:
    """Prints the rows of `gshard-bench partition` for a person."""
    caption = "ratio: to the same program without annotations"
    table = _table(caption, "training step", "seconds", "ratio", "compile")
    for row in rows:
        cells = f"{row.seconds:.4f}", f"{row.ratio:.3f}", f"{row.compile_seconds:.1f}"
        table.add_row(row.name, *cells)
    console.print(table)


def print_depth_table(console: rich.console.Console, rows: list[depth.Row]) -> None:
    """Prints the rows of `gshard-bench depth` for a person."""
    caption = "ratio: to the same layers one by one"
    table = _table(caption, "training step", "compile", "seconds", "ratio")
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        table.add_row(row.name, f"{row.compile_seconds:.1f}", f"{row.seconds:.3f}", ratio)
    console.print(table)


def print_choices_table(console: rich.console.Console, rows: list[choices.Row]) -> None:
    """Prints the rows of `gshard-bench choices` for a person."""
    caption = f"ratio: to {choices.AS_IT_IS}; MiB: of the state, and of temporaries"
    table = _table(caption, "training step", "state", "temporaries", "seconds", "ratio", "compile")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.state_bytes / 2**20:,.1f}",
            f"{row.temporary_bytes / 2**20:,.1f}",
            f"{row.seconds:.3f}",
            f"{row.ratio:.2f}",
            f"{row.compile_seconds:.1f}",
        )
    console.print(table)


def print_moe_table(console: rich.console.Console, rows: list[moe.Row]) -> None:
    """Prints the rows of `gshard-bench moe` for a person."""
    caption = "to dense: to the time of a dense layer of the same active FLOPs; routing: share of "
    caption += "all but the experts' products; GEMM: useful FLOPs to the rate of a matrix product; "
    caption += "MiB: of temporaries"
    table = _table(
        caption,
        "experts, dispatch, load",
        "capacity",
        "ms",
        "to dense",
        "routing",
        "GEMM",
        "dropped",
        "MiB",
    )
    for group in moe.by_experts(rows):
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
    console.print(table)


def _table(caption: str, what: str, *headings: str) -> rich.table.Table:
    """A table of what is measured and, right-aligned, of numbers."""
    table = rich.table.Table(box=rich.box.SIMPLE, caption=caption)
    table.add_column(what)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
