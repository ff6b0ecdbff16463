"""Measures how much of the device's speed a program gets.

    gshard-bench step
    gshard-bench step --json=step.json
    gshard-bench step --experiment=translation.hundred_languages --repeats=20
    gshard-bench partition
    gshard-bench moe --json=moe.json

`step` takes training steps, optimizer included, of an experiment and of an encoder alone, each with
its mixtures of experts and with dense layers of the same FLOPs in their place. In turns with them
it multiplies two square float32 matrices, and says what share of that rate the steps reach:

    ratio = flops / seconds / gemm_rate

flops counts useful operations only: products of matrices, forward and backward, and of experts
those that a token uses; see lingvo_gshard/training/flops.py for the formulas. seconds is the best
of --repeats; gemm_rate, in operations per second, the best of as many times the products that have
together a step's operations; and compile_seconds what the first step of a shape takes. No corpus is
read and nothing is kept.

`partition` takes training steps of an experiment by the spmd runtime on a mesh of one device, where
there is nothing to cut, in turns with the same program compiled by jax alone without a mesh and
without annotations, and with the local runtime. Here ratio is seconds over those of the program
without annotations: 1.00 says that partitioning costs nothing.

`moe` takes the forward and backward pass of a mixture-of-experts layer alone, top-2, for each of
--experts and each way to dispatch, in turns with a dense layer of the same active FLOPs: with
learned gates, with loads that are balanced, and with loads so skewed that --skew of all tokens go
to one expert first, where the buffers of `gather` have room for them.

The JSON is {"device": ..., "rows": [{name, flops, seconds, gemm_rate, ratio, compile_seconds}]},
for `partition` without flops and gemm_rate, and for `moe` [{experts, dispatch, load,
capacity_factor, milliseconds, dense_milliseconds, ratio_to_dense, routing_share, gemm_rate,
gemm_ratio, dropped_share, peak_bytes, temporary_bytes}]; --json alone prints it, and the table then
goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

from absl import flags

from lingvo_gshard.tools import _start

_start.quiet_tensorflow()

import rich.box  # noqa: E402
import rich.console  # noqa: E402
import rich.table  # noqa: E402
import tensorflow as tf  # noqa: E402

from lingvo_gshard import params as experiments  # noqa: E402, F401
from lingvo_gshard.core import names, registry  # noqa: E402
from lingvo_gshard.core.params import Params  # noqa: E402
from lingvo_gshard.layers.transformer import TransformerStack  # noqa: E402
from lingvo_gshard.runtime import allocator  # noqa: E402
from lingvo_gshard.tools import _moe_bench, _partition_bench, _step_bench  # noqa: E402

NAME = "gshard-bench"
SUBCOMMANDS = ("step", "partition", "moe")
STANDARD_OUTPUT = "-"


def define_flags() -> flags.FlagValues:
    """Returns this program's flags."""
    values = flags.FlagValues()

    def integer(name: str, default: int, help: str) -> None:
        flags.DEFINE_integer(name, default, help, 1, flag_values=values)

    def string(name: str, default: str | None, help: str) -> None:
        flags.DEFINE_string(name, default, help, flag_values=values)

    string("experiment", "translation.quickstart", "The experiment whose step is measured.")
    string("json", None, "File for the result; -, or no value, for standard output.")
    integer("repeats", 10, "How often each step is taken; the best counts, of `moe` the median.")
    integer("gemm_size", 2048, "Rows and columns of the matrices of the product.")
    integer("model_dim", 512, "Model dimension of the encoder alone.")
    integer("hidden_dim", 2048, "Hidden dimension of its feed-forward layers and experts.")
    integer("num_experts", 8, "Experts of its mixtures of experts.")
    integer("num_heads", 8, "Attention heads of each of its layers.")
    integer("num_layers", 2, "Its layers; every other one has experts.")
    integer("tokens", 4096, "Tokens of its batch.")
    integer("row_length", 256, "Tokens of a row of its batch.")
    integer("group_size", 1024, "Tokens that the mixtures of experts of `moe` route together.")
    flags.DEFINE_list(
        "experts", ["8", "32", "64", "128"], "How many experts `moe` measures.", flag_values=values
    )
    flags.DEFINE_float(
        "skew", 0.2, "Share of tokens that one expert gets first.", 0, 1, flag_values=values
    )
    return values


def main(argv: list[str]) -> int:
    """Runs the program; returns the exit code. ValueError for a user's mistake."""
    values = define_flags()
    argv = [f"--json={STANDARD_OUTPUT}" if a == "--json" else a for a in argv]
    subcommand = next((a for a in argv[1:] if not a.startswith("-")), None)
    _start.parse_flags(values, [a for a in argv if a != subcommand], __doc__)
    if subcommand not in SUBCOMMANDS:
        given = f"{subcommand!r} is unknown" if subcommand else "is missing"
        hint = names.nearest(subcommand or "", SUBCOMMANDS)
        raise ValueError(f"the subcommand, what to measure, {given}. {hint}")
    console = rich.console.Console(stderr=values.json == STANDARD_OUTPUT)
    measure, show = {
        "step": (measure_step, print_table),
        "partition": (measure_partition, print_partition_table),
        "moe": (measure_moe, print_moe_table),
    }[subcommand]
    rows = measure(values, console)
    show(console, rows)
    write_json(values.json, rows)
    return 0


def measure_step(values: flags.FlagValues, console: rich.console.Console) -> list[_step_bench.Row]:
    """Returns the rows of `gshard-bench step`."""
    if values.tokens % values.row_length:
        raise ValueError(
            f"--tokens={values.tokens} are no whole rows of --row_length={values.row_length}"
        )
    experiment = registry.get(values.experiment)
    cases = _step_bench.translation_cases(experiment)
    cases += _step_bench.stack_cases(
        stack_params(values),
        experiment.trainer,
        rows=values.tokens // values.row_length,
        length=values.row_length,
    )
    with console.status("starting") as status:
        return _step_bench.measure(cases, values.repeats, values.gemm_size, status.update)


def measure_partition(
    values: flags.FlagValues, console: rich.console.Console
) -> list[_partition_bench.Row]:
    """Returns the rows of `gshard-bench partition`."""
    case = _step_bench.translation_cases(registry.get(values.experiment))[0]
    with console.status("starting") as status:
        return _partition_bench.measure(case, values.repeats, status.update)


def measure_moe(values: flags.FlagValues, console: rich.console.Console) -> list[_moe_bench.Row]:
    """Returns the rows of `gshard-bench moe`."""
    try:
        experts = [int(count) for count in values.experts]
    except ValueError:
        raise ValueError(f"--experts={','.join(values.experts)}: numbers were expected") from None
    sizes = _moe_bench.Sizes(values.model_dim, values.hidden_dim, values.tokens, values.group_size)
    with console.status("starting") as status:
        return _moe_bench.measure(
            sizes, experts, values.skew, values.repeats, values.gemm_size, status.update
        )


def stack_params(values: flags.FlagValues) -> Params:
    """Returns the Params of the encoder alone; dropout is the paper's (arXiv 2006.16668)."""
    stack = TransformerStack.params().set(
        num_layers=values.num_layers,
        model_dim=values.model_dim,
        num_heads=values.num_heads,
        hidden_dim=values.hidden_dim,
        input_dropout_rate=0.1,
        residual_dropout_rate=0.1,
        attention_dropout_rate=0.1,
    )
    stack.moe.num_experts = values.num_experts
    return stack


def print_table(console: rich.console.Console, rows: list[_step_bench.Row]) -> None:
    """Prints the rows for a person."""
    table = rich.table.Table(box=rich.box.SIMPLE, caption="ratio: to the rate of a matrix product")
    table.add_column("training step", no_wrap=True)
    for heading in ("GFLOP", "seconds", "GFLOP/s", "product", "ratio", "compile"):
        table.add_column(heading, justify="right")
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


def print_partition_table(console: rich.console.Console, rows: list[_partition_bench.Row]) -> None:
    """Prints the rows of `gshard-bench partition` for a person."""
    caption = "ratio: to the same program without annotations"
    table = rich.table.Table(box=rich.box.SIMPLE, caption=caption)
    table.add_column("training step", no_wrap=True)
    for heading in ("seconds", "ratio", "compile"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = f"{row.seconds:.4f}", f"{row.ratio:.3f}", f"{row.compile_seconds:.1f}"
        table.add_row(row.name, *cells)
    console.print(table)


def print_moe_table(console: rich.console.Console, rows: list[_moe_bench.Row]) -> None:
    """Prints the rows of `gshard-bench moe` for a person."""
    caption = "to dense: to the time of a dense layer of the same active FLOPs; routing: share of "
    caption += "all but the experts' products; GEMM: useful FLOPs to the rate of a matrix product; "
    caption += "MiB: of temporaries"
    table = rich.table.Table(box=rich.box.SIMPLE, caption=caption)
    table.add_column("experts, dispatch, load", no_wrap=True)
    for heading in ("capacity", "ms", "to dense", "routing", "GEMM", "dropped", "MiB"):
        table.add_column(heading, justify="right")
    for group in _moe_bench.by_experts(rows):
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


def write_json(path: str | None, rows: list) -> None:
    """Writes the rows to a file or to standard output, or not at all."""
    if path is None:
        return
    device = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    result = {"device": device, "rows": [dataclasses.asdict(row) for row in rows]}
    text = json.dumps(result, indent=1)
    if path == STANDARD_OUTPUT:
        print(text)
    else:
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def run() -> None:
    """The console script."""
    allocator.keep_pages()
    _start.run_program(NAME, main)


if __name__ == "__main__":
    run()
