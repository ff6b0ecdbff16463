"""Measures how much of the device's speed a program gets.

    gshard-bench step
    gshard-bench step --json=step.json
    gshard-bench step --experiment=translation.hundred_languages --repeats=20
    gshard-bench partition
    gshard-bench moe --json=moe.json
    gshard-bench depth --depths=6,48
    gshard-bench choices --num_layers=6
    gshard-bench exported train_step.zip --json=exported.json

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

`depth` takes training steps of the encoder alone with each of --depths layers, compiled as one loop
(`repeat`), and with the fewest of them also layer by layer, in turns with the loop; ratio is to
that one's seconds. compile_seconds should not grow with depth. Both compute again what
--rematerialize says.

`choices` takes steps of an experiment, of --num_layers layers on each side, with one of the ways to
train a larger model at a time (docs/training.md), in turns with steps without; ratio is to those.
State are the arguments of the step: weights, moments and the batch.

`exported` runs a training step that gshard-inspect --program has saved (docs/programs.md), by jax
alone, on the devices that jax finds, an NVIDIA GPU as well as a CPU. TensorFlow is not needed. The
state is that of --init_state, or made up; the batch has packed rows of random ids. Steps are taken
in runs, whose metrics are read one step late, in turns with products of large matrices of the type
that most of the step's products have, on all its devices at once:

    mfu = flops / step_seconds / gemm_rate

flops and tokens stand in the file; step_seconds and gemm_rate are medians of --repeats runs.

The JSON is {"device": ..., "rows": [{name, flops, seconds, gemm_rate, ratio, compile_seconds}]},
for `partition` without flops and gemm_rate, and for `moe` [{experts, dispatch, load,
capacity_factor, milliseconds, dense_milliseconds, ratio_to_dense, routing_share, gemm_rate,
gemm_ratio, dropped_share, peak_bytes, temporary_bytes}], for `depth` [{name, layers, repeat,
compile_seconds, seconds, ratio}], for `choices` [{name, state_bytes, temporary_bytes, seconds,
ratio, compile_seconds}], and for `exported` [{file, mesh, devices,
step_seconds, fastest_seconds, slowest_seconds, tokens, tokens_per_second, flops, gemm_dtype,
gemm_size, gemm_rate, mfu, compile_seconds, peak_bytes, first_loss, last_loss}]; --json alone prints
it, and the table then goes to standard error.
"""

from __future__ import annotations

import typing

import rich.box
import rich.console
import rich.table
from absl import flags

from lingvo_gshard.core.config import names
from lingvo_gshard.tools.console import output, startup

if typing.TYPE_CHECKING:
    from lingvo_gshard.tools.benchmarks import exported

NAME = "gshard-bench"
SUBCOMMANDS = ("step", "partition", "moe", "depth", "choices", "exported")
EXPORTED = "exported"


def define_flags() -> flags.FlagValues:
    """Returns this program's flags."""
    values = flags.FlagValues()

    def integer(name: str, default: int, help: str) -> None:
        flags.DEFINE_integer(name, default, help, 1, flag_values=values)

    def string(name: str, default: str | None, help: str) -> None:
        flags.DEFINE_string(name, default, help, flag_values=values)

    string("experiment", "translation.quickstart", "The experiment whose step is measured.")
    output.define_json_flag(values)
    integer("repeats", 10, "How often each step is taken; the best counts, of `moe` the median.")
    integer(
        "gemm_size",
        2048,
        "Rows and columns of the matrices of the product; of `exported` by default as many as the "
        "device needs to be fast.",
    )
    string("init_state", None, "File of the init_state program that draws `exported`'s weights.")
    integer("model_dim", 512, "Model dimension of the encoder alone.")
    integer("hidden_dim", 2048, "Hidden dimension of its feed-forward layers and experts.")
    integer("num_experts", 8, "Experts of its mixtures of experts.")
    integer("num_heads", 8, "Attention heads of each of its layers.")
    integer("num_layers", 2, "Its layers; every other one has experts.")
    string("rematerialize", "none", "What of its layers is computed again (docs/training.md).")
    integer("tokens", 4096, "Tokens of its batch.")
    integer("row_length", 256, "Tokens of a row of its batch.")
    integer("group_size", 1024, "Tokens that the mixtures of experts of `moe` route together.")
    flags.DEFINE_list(
        "experts", ["8", "32", "64", "128"], "How many experts `moe` measures.", flag_values=values
    )
    flags.DEFINE_list(
        "depths", ["6", "48"], "How many layers `depth` measures.", flag_values=values
    )
    flags.DEFINE_float(
        "skew", 0.2, "Share of tokens that one expert gets first.", 0, 1, flag_values=values
    )
    return values


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = define_flags()
    words = [a for a in argv[1:] if not a.startswith("-")]
    subcommand, files = (words or [None])[0], []
    if subcommand == EXPORTED:
        files = words[1:]
    startup.parse_flags(values, [a for a in argv if a not in (subcommand, *files)], __doc__)
    if subcommand not in SUBCOMMANDS:
        given = f"{subcommand!r} is unknown" if subcommand else "is missing"
        hint = names.nearest(subcommand or "", SUBCOMMANDS)
        raise ValueError(f"the subcommand, what to measure, {given}. {hint}")
    console = rich.console.Console(stderr=values.json == output.STANDARD_OUTPUT)
    if subcommand == EXPORTED:
        device, rows = measure_exported(values, files, console)
    else:
        device, rows = measure_model(values, subcommand, console)
    output.write_json(values.json, {"device": device, "rows": rows})
    return 0


def measure_model(
    values: flags.FlagValues, subcommand: str, console: rich.console.Console
) -> tuple[str, list]:
    """Measures what TensorFlow traces, and prints it; returns the kind of device and the rows."""
    with startup.quiet_tensorflow():
        from lingvo_gshard.tools.benchmarks import models

    return models.run(subcommand, values, console)


def measure_exported(
    values: flags.FlagValues, files: list[str], console: rich.console.Console
) -> tuple[str, list]:
    """Measures a saved step, and prints it; returns the device and the row. Without TensorFlow."""
    from lingvo_gshard.tools.benchmarks import exported

    if len(files) != 1:
        raise ValueError(
            f"exported takes one file, {len(files)} were given; write it with "
            "gshard-inspect --program=train_step.zip"
        )
    gemm_size = values.gemm_size if values["gemm_size"].present else None
    with console.status("starting") as status:
        row = exported.measure(
            files[0], values.init_state, values.repeats, gemm_size, status.update
        )
    device = exported.device()
    print_exported(console, device, row)
    return device, [row]


def print_exported(console: rich.console.Console, device: str, row: exported.Row) -> None:
    """Prints the row of a saved step for a person."""
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    extremes = f"{row.fastest_seconds * 1e3:,.2f} to {row.slowest_seconds * 1e3:,.2f}"
    where = f"{row.devices} x {device}" + (f" as {row.mesh}" if row.mesh else "")
    product = f"{row.gemm_rate / 1e12:,.4g} TFLOP/s, {row.gemm_size} x {row.gemm_size}"
    for name, text in (
        ("training step", row.file),
        ("devices", where),
        ("step", f"{row.step_seconds * 1e3:,.2f} ms, median; {extremes}"),
        ("tokens", f"{row.tokens_per_second:,.0f}/s, {row.tokens:,} in a step"),
        ("useful", f"{row.flops / 1e12:,.4g} TFLOP in a step"),
        ("product", f"{product}, {row.gemm_dtype}"),
        ("MFU", f"{row.mfu:.1%} of the product's rate"),
        ("compiled in", f"{row.compile_seconds:.1f} s"),
        ("memory", f"{row.peak_bytes / 2**20:,.0f} MiB on each device"),
        ("loss", f"{row.first_loss:.4f}, then {row.last_loss:.4f}"),
    ):
        table.add_row(name, text)
    console.print(table)
