"""Measures how fast programs run, compared with the device's rate for matrix products.

    gshard-bench step
    gshard-bench step --json=step.json
    gshard-bench step --profile=profiles
    gshard-bench step --experiment=translation.hundred_languages --repeats=20
    gshard-bench partition
    gshard-bench moe --json=moe.json
    gshard-bench depth --depths=6,48
    gshard-bench choices --num_layers=6
    gshard-bench decode --json=decode.json
    gshard-bench decode --peers_python=peers/bin/python
    gshard-bench exported train_step.zip --json=exported.json
    gshard-bench serve --logdir=runs/quickstart --clients=300 --seconds=60
    gshard-bench input --rows=20000000 --workers=2 --json=input.json
    gshard-bench input --prepared=prepared/large
    gshard-bench parity --peers_python=peers/bin/python --families=llama,mixtral

`step` measures training steps, optimizer included, of an experiment and of an encoder alone. Each
is measured with its mixtures of experts, and with dense layers of the same FLOPs instead. Steps
alternate with products of two square float32 matrices:

    ratio = flops / seconds / gemm_rate

flops counts useful operations: matrix products, forward and backward, of active experts only.
seconds is the best of --repeats steps. gemm_rate, in FLOP/s, is the best of --repeats runs of as
many products as match the FLOPs of a step. compile_seconds is the time of the first step. No data
is read, and nothing is saved. With --profile=DIR, three more steps of each model are profiled
(docs/profiling.md).

`partition` measures training steps of an experiment by the spmd runtime on a mesh of one device,
where there is nothing to partition. They alternate with steps of the same program compiled by JAX
without mesh and annotations, and with steps of the single-device runtime. ratio is the time
relative to the program without annotations: 1.00 means that partitioning costs nothing.

`moe` measures the forward and backward pass of a top-2 mixture-of-experts layer for each number of
--experts and each dispatch, alternating with a dense layer of the same active FLOPs. The loads are
learned, balanced, or skewed: then --skew is the share of all tokens whose first expert is expert 0.

`depth` measures training steps of the encoder alone, with each of --depths layers compiled as one
loop. The smallest depth is also compiled layer by layer; ratio is relative to that. compile_seconds
should not grow with depth. --rematerialize applies to both.

`choices` measures steps of an experiment with --num_layers layers on each side, and each technique
for training larger models (docs/training.md) by itself. ratio is relative to the step without any.
The state is the step's arguments: weights, optimizer moments and the batch. loss is that of a batch
after 31 steps on it.

`decode` measures how fast an experiment's model and --language_model generate tokens: with greedy
and beam search, for many test sentences and for one. Weights are random, and every text gets a
fixed number of tokens. With the extra `peers` (docs/decoding_speed.md), PyTorch with transformers
and CTranslate2 decode the same batches in turn, with dense models of the same active FLOPs:

    ratio = our tokens per second / tokens per second of the other engine
    limit_share = flops / seconds / gemm_rate

flops counts products that cannot be avoided. For one text gemm_rate is that of a vector with a
matrix of the size of the model's weights. Values are medians of --repeats turns.

`exported` runs a training step saved by gshard-inspect --program (docs/programs.md) with JAX alone,
on a GPU or CPU. TensorFlow is not needed. The state comes from --init_state or is synthetic; the
batch is packed rows of random ids. Metrics are read one step late. Steps alternate with large
matrix products of the step's main dtype on all devices at once:

    mfu = flops / step_seconds / gemm_rate

flops and tokens are stored in the file; step_seconds and gemm_rate are medians of --repeats runs.

`fill` makes an experiment as large as a card's memory allows by its plan, and saves its step in a
folder; `card` measures the step on the card and compares it with its plan (docs/gpu.md):

    gshard-bench fill --experiment=language_model.one_gpu_dense --topology=gpu:h100:1x1 \\
        --folder=dense
    gshard-bench card dense --json=card.json

`serve` starts gshard-serve with a trained translation model, lets --clients send one sentence after
another for --seconds, and compares every answer with the translation in this process. ratio is the
server's generated tokens per second relative to those of the translator in this process, which
translates the same sentences before and after.

`input` prepares made text with gshard-prepare: rows per second, and the memory of all processes
together, which depends on --workers and not on --rows. Then it reads what was prepared, or the
directory --prepared (docs/data.md): tokens per second, the share of positions that hold tokens, and
the share of time that the quickstart's training steps wait for batches.

`parity` measures no speed. transformers, of --peers_python, makes small random models of --families
with each option of their configs. Each is imported, and compared with transformers: logits,
gradients, greedy tokens, and the exported model's tensors and logits (docs/open_models.md).

The JSON is {"device": ..., "rows": [...]}. The fields of a row are those of the class `Row` in the
benchmark's file in lingvo_gshard/tools/benchmarks/. --json alone writes the JSON to standard output
and the table to standard error.
"""

from __future__ import annotations

import functools
import tempfile
import typing

import rich.box
import rich.console
import rich.table
from absl import flags

from lingvo_gshard.api import tables
from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.benchmarks.card import command as card
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.flags.run import required_logdir

if typing.TYPE_CHECKING:
    from lingvo_gshard.tools.benchmarks import exported, serve

NAME = "gshard-bench"
SUBCOMMANDS = (
    "step",
    "partition",
    "moe",
    "depth",
    "choices",
    "decode",
    "exported",
    "fill",
    "card",
    "serve",
    "input",
    "parity",
)
EXPORTED, SERVE, INPUT = "exported", "serve", "input"


def define_flags() -> flags.FlagValues:
    """Returns this program's flags."""
    values = flags.FlagValues()

    def integer(name: str, default: int, help: str) -> None:
        flags.DEFINE_integer(name, default, help, 1, flag_values=values)

    def string(name: str, default: str | None, help: str) -> None:
        flags.DEFINE_string(name, default, help, flag_values=values)

    string("experiment", "translation.quickstart", "The experiment whose model is measured.")
    output.define_json_flag(values)
    integer("repeats", 10, "Number of measurements of each step.")
    integer(
        "gemm_size",
        2048,
        "Rows and columns of the reference product's matrices. `exported` by default chooses a "
        "size that reaches the device's full rate.",
    )
    string(
        "init_state", None, "File of the init_state program that makes the weights of `exported`."
    )
    string("profile", None, "Directory for a profile of each model that `step` measures.")
    integer("model_dim", 512, "Model dimension of the encoder alone.")
    integer(
        "hidden_dim", 2048, "Hidden dimension of the encoder's feed-forward layers and experts."
    )
    integer("num_experts", 8, "Number of experts of the encoder's mixtures of experts.")
    integer("num_heads", 8, "Attention heads of each layer of the encoder.")
    integer("num_layers", 2, "Number of layers of the encoder; every other one has experts.")
    string("rematerialize", "none", "Rematerialization policy of the encoder (docs/training.md).")
    integer("tokens", 4096, "Tokens of the encoder's batch.")
    integer("row_length", 256, "Tokens of a row of the encoder's batch.")
    integer("group_size", 1024, "Tokens that `moe` routes together as one group.")
    string("logdir", None, "Directory of the trained model of `serve`.")
    integer("clients", 300, "Clients of `serve` that send requests at the same time.")
    integer("seconds", 60, "How long `serve` measures.")
    integer("beam_size", 4, "Hypotheses of each search of `serve`.")
    flags.DEFINE_list(
        "experts",
        ["8", "32", "64", "128"],
        "Numbers of experts that `moe` measures.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "depths", ["6", "48"], "Numbers of layers that `depth` measures.", flag_values=values
    )
    flags.DEFINE_float(
        "skew",
        0.2,
        "Share of tokens whose first expert is expert 0 in the skewed loads of `moe`.",
        0,
        1,
        flag_values=values,
    )
    define_input_flags(values)
    define_decode_flags(values)
    card.define_card_flags(values)
    return values


def define_input_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `input`."""
    flags.DEFINE_integer(
        "rows", 1_000_000, "Rows of made text that `input` prepares.", 1, flag_values=values
    )
    flags.DEFINE_integer(
        "workers", 2, "Processes that `input` prepares them with.", 1, flag_values=values
    )
    flags.DEFINE_string(
        "prepared",
        None,
        "Prepared sentence pairs that `input` reads instead of made text.",
        flag_values=values,
    )


def define_decode_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `decode` and `parity`, which compare with other libraries."""
    flags.DEFINE_string(
        "language_model",
        "language_model.quickstart",
        "The second model of `decode`.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "sentences", 500, "Test sentences that `decode` translates.", 1, flag_values=values
    )
    flags.DEFINE_string(
        "peers_python",
        None,
        "Python with torch, transformers and, for `decode`, ctranslate2.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "families", [], "Families that `parity` compares; by default all.", flag_values=values
    )
    flags.DEFINE_integer(
        "threads",
        0,
        "Threads of each engine of `decode`; 0: one for each core.",
        0,
        flag_values=values,
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
    if values.profile is not None and subcommand != "step":
        raise UserError(f"--profile={values.profile} applies to `step`, not to `{subcommand}`")
    card.check_flags(values, subcommand)
    output.check_writable(values, "json")
    console = output.make_console(values.json)
    if subcommand == EXPORTED:
        device, rows = measure_exported(values, files, console)
    elif subcommand in (card.FILL, card.CARD):
        run = card.run_fill if subcommand == card.FILL else functools.partial(card.run_card, files)
        device, row = run(values, console)
        rows = [row]
    elif subcommand == SERVE:
        device, rows = "CPU", [measure_server(values, console)]
    elif subcommand == INPUT:
        device, rows = "CPU", measure_input(values, console)
    else:
        device, rows = measure_model(values, subcommand, console)
    output.write_json(values.json, {"device": device, "rows": rows})
    return 0


def measure_model(
    values: flags.FlagValues, subcommand: str, console: rich.console.Console
) -> tuple[str, list]:
    """Measures programs that TensorFlow traces; returns the kind of device and the rows."""
    from lingvo_gshard.tools.benchmarks import subcommands

    return subcommands.run(subcommand, values, console)


def measure_server(values: flags.FlagValues, console: rich.console.Console) -> serve.Row:
    """Measures gshard-serve with many clients; returns the row."""
    from lingvo_gshard.tools.benchmarks import serve

    logdir = required_logdir(values)
    with console.status("starting") as status:
        row = serve.measure(logdir, values.clients, values.seconds, values.beam_size, status.update)
    serve.print_row(console, row)
    return row


def measure_input(values: flags.FlagValues, console: rich.console.Console) -> list:
    """Measures gshard-prepare and reading, or reading of --prepared alone; returns the rows."""
    from lingvo_gshard.tools.benchmarks.input import preparation, reading

    rows, directory = [], values.prepared
    with tempfile.TemporaryDirectory(prefix="gshard-bench-") as folder:
        if directory is None:
            directory = f"{folder}/prepared"
            with console.status("starting") as status:
                row = preparation.measure(values.rows, values.workers, folder, status.update)
            preparation.print_rows(console, [row])
            rows.append(row)
        with console.status("starting") as status:
            found = reading.measure(directory, status.update)
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
    with console.status("starting") as status:
        row = exported.measure(
            files[0], values.init_state, values.repeats, gemm_size, status.update
        )
    device = exported.device()
    print_exported(console, device, row)
    return device, [row]


def print_exported(console: rich.console.Console, device: str, row: exported.Row) -> None:
    """Prints the result of a saved step."""
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
    tables.print_table(console, table)
