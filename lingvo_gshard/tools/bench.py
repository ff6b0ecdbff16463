"""Measures how fast programs run, compared with the device's rate for matrix products.

    gshard-bench step
    gshard-bench step --json=step.json
    gshard-bench step --profile=profiles
    gshard-bench step --experiment=translation.hundred_languages --repeats=20
    gshard-bench moe --json=moe.json
    gshard-bench decode --json=decode.json
    gshard-bench exported train_step.zip --json=exported.json
    gshard-bench input --rows=20000000 --workers=2 --json=input.json
    gshard-bench input --prepared=prepared/large

`step` measures training steps, optimizer included, of an experiment and of an encoder alone: with
mixtures of experts, and with dense layers of the same FLOPs instead. Steps alternate with products
of two square float32 matrices. The ratio is the rate of useful operations in the best step over the
best rate of the products. With --profile=DIR, three more steps of each model are profiled
(docs/profiling.md).

`moe` measures the forward and backward pass of a top-2 mixture-of-experts layer for each number of
--experts and each dispatch, alternating with a dense layer of the same active FLOPs. The loads are
learned, balanced, or skewed: then --skew is the share of all tokens whose first expert is expert 0.

`decode` measures how fast an experiment's model and --language_model generate tokens: with greedy
and beam search, for many test sentences and for one (docs/decoding_speed.md). Weights are random,
and every text gets a fixed number of tokens. Values are medians of --repeats turns.

`exported` runs a training step saved by gshard-inspect --program (docs/programs.md) with JAX alone,
on a GPU or CPU. TensorFlow is not needed. The state comes from --init_state or is synthetic; the
batch is packed rows of random ids. Steps alternate with large matrix products of the step's main
dtype on all devices at once; MFU is relative to their rate.

`fill` makes an experiment as large as a card's memory allows by its plan, and saves its step in a
folder; `card` measures the step on the card and compares it with its plan (docs/gpu.md):

    gshard-bench fill --experiment=language_model.one_gpu_dense --topology=gpu:h100:1x1 \\
        --folder=dense
    gshard-bench card dense --json=card.json

`input` prepares made text with gshard-prepare: rows per second, and the memory of all processes
together, which depends on --workers and not on --rows. Then it reads what was prepared, or the
directory --prepared (docs/data.md): tokens per second, the share of positions that hold tokens, and
the share of time that the quickstart's training steps wait for batches.

The JSON is {"device": ..., "rows": [...]}. A class in the benchmark's file, in
lingvo_gshard/tools/benchmarks/, describes the fields of a row. --json alone writes the JSON
to standard output and the table to standard error.
"""

from __future__ import annotations

import functools
import tempfile
import typing

import rich.console
from absl import flags

from lingvo_gshard.api import tables
from lingvo_gshard.core import UserError
from lingvo_gshard.core.config import names
from lingvo_gshard.tools.benchmarks.card import command as card
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.console.stages import transient_stages
from lingvo_gshard.tools.flags.definitions import (
    Flags,
    comma_list,
    decimal,
    integer,
    make_flags,
    refuse,
    string,
)

if typing.TYPE_CHECKING:
    from lingvo_gshard.tools.benchmarks import exported

NAME = "gshard-bench"
SUBCOMMANDS = (
    "step",
    "moe",
    "decode",
    "exported",
    "fill",
    "card",
    "input",
)
EXPORTED, INPUT = "exported", "input"


# The flags that choose what `decode` decodes.
DECODED: Flags = {
    "language_model": string("The second model of `decode`.", "language_model.quickstart"),
    "sentences": integer("Test sentences that `decode` translates.", 500, 1),
}


def define_flags() -> flags.FlagValues:
    """Returns this program's flags."""
    return make_flags(
        experiment=string("The experiment whose model is measured.", "translation.quickstart"),
        json=output.json_flag(),
        repeats=integer("Number of measurements of each step.", 10, 1),
        gemm_size=integer(
            "Rows and columns of the reference product's matrices. `exported` by default chooses a "
            "size that reaches the device's full rate.",
            2048,
            1,
        ),
        init_state="File of the init_state program that makes the weights of `exported`.",
        profile="Directory for a profile of each model that `step` measures.",
        **stack_flags(),
        group_size=integer("Tokens that `moe` routes together as one group.", 1024, 1),
        experts=comma_list("Numbers of experts that `moe` measures.", ["8", "32", "64", "128"]),
        skew=decimal(
            "Share of tokens whose first expert is expert 0 in the skewed loads of `moe`.",
            0.2,
            0,
            1,
        ),
        rows=integer("Rows of made text that `input` prepares.", 1_000_000, 1),
        workers=integer("Processes that `input` prepares them with.", 2, 1),
        prepared="Prepared sentence pairs that `input` reads instead of made text.",
        **DECODED,
        threads=integer("Threads of the engine of `decode`; 0: one for each core.", 0, 0),
        **card.card_flags(),
    )


def stack_flags() -> Flags:
    """Returns the flags of an encoder alone."""
    return dict(
        model_dim=integer("Model dimension of the encoder alone.", 512, 1),
        hidden_dim=integer(
            "Hidden dimension of the encoder's feed-forward layers and experts.", 2048, 1
        ),
        num_experts=integer("Number of experts of the encoder's mixtures of experts.", 8, 1),
        num_heads=integer("Attention heads of each layer of the encoder.", 8, 1),
        num_layers=integer("Number of layers of the encoder; every other one has experts.", 2, 1),
        rematerialize=string("Rematerialization policy of the encoder (docs/training.md).", "none"),
        tokens=integer("Tokens of the encoder's batch.", 4096, 1),
        row_length=integer("Tokens of a row of the encoder's batch.", 256, 1),
    )


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = define_flags()
    words = [a for a in argv[1:] if not a.startswith("-")]
    subcommand, files = (words or [None])[0], []
    if subcommand in (EXPORTED, card.CARD):
        files = words[1:]
    startup.parse_flags(values, [a for a in argv if a not in (subcommand, *files)], __doc__)
    if subcommand not in SUBCOMMANDS:
        given = f"{subcommand!r} is unknown" if subcommand else "is missing"
        hint = names.nearest(subcommand or "", SUBCOMMANDS)
        raise UserError(f"the subcommand {given}. {hint}")
    if subcommand != "step":
        refuse(values, ("profile",), f"applies to `step`, not to `{subcommand}`")
    card.check_flags(values, subcommand)
    output.check_writable(values, "json")
    console = output.make_console(values.json)
    if subcommand == EXPORTED:
        device, rows = measure_exported(values, files, console)
    elif subcommand in (card.FILL, card.CARD):
        run = card.run_fill if subcommand == card.FILL else functools.partial(card.run_card, files)
        device, row = run(values, console)
        rows = [row]
    elif subcommand == INPUT:
        device, rows = "CPU", measure_input(values, console)
    else:
        from lingvo_gshard.tools.benchmarks import subcommands

        device, rows = subcommands.run(subcommand, values, console)
    output.write_json(values.json, {"device": device, "rows": rows})
    return 0


def measure_input(values: flags.FlagValues, console: rich.console.Console) -> list:
    """Measures gshard-prepare and reading, or reading of --prepared alone; returns the rows."""
    from lingvo_gshard.tools.benchmarks.input import preparation, reading

    rows, directory = [], values.prepared
    with tempfile.TemporaryDirectory(prefix="gshard-bench-") as folder:
        if directory is None:
            directory = f"{folder}/prepared"
            with transient_stages(console, "starting") as progress:
                row = preparation.measure(values.rows, values.workers, folder, progress)
            preparation.print_rows(console, [row])
            rows.append(row)
        with transient_stages(console, "starting") as progress:
            found = reading.measure(directory, progress)
    reading.print_rows(console, found)
    return [*rows, *found]


def measure_exported(
    values: flags.FlagValues, files: list[str], console: rich.console.Console
) -> tuple[str, list]:
    """Measures a saved step without TensorFlow; returns the device and the row."""
    from lingvo_gshard.tools.benchmarks import exported

    if len(files) != 1:
        raise UserError(
            f"exported takes one file, {len(files)} were given; write it with "
            "gshard-inspect --program=train_step.zip"
        )
    gemm_size = values.gemm_size if values["gemm_size"].present else None
    with transient_stages(console, "starting") as progress:
        row = exported.measure(files[0], values.init_state, values.repeats, gemm_size, progress)
    device = exported.device()
    print_exported(console, device, row)
    return device, [row]


def print_exported(console: rich.console.Console, device: str, row: exported.ProgramTiming) -> None:
    """Prints the result of a saved step."""
    extremes = f"{row.fastest_seconds * 1e3:,.2f} to {row.slowest_seconds * 1e3:,.2f}"
    where = f"{row.devices} x {device}" + (f" as {row.mesh}" if row.mesh else "")
    product = f"{row.gemm_rate / 1e12:,.4g} TFLOP/s, {row.gemm_size} x {row.gemm_size}"
    facts = (
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
    )
    tables.print_facts(console, facts)
