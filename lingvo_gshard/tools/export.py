"""Writes a trained model for programs that do not have this package.

    gshard-export --logdir=runs/quickstart --output=model --format=safetensors

Formats:

safetensors: the weights by path in model.safetensors, their layouts in its metadata, the Params as
JSON, and the vocabularies as SentencePiece models. For PyTorch, jax, NumPy, Rust, ...

If the run keeps averages of its weights, these are written, as evaluation and decoding use them.

--output must not exist, or be empty. It is complete or not there at all: it is written under
another name and renamed at the end. docs/export.md shows how to read each format.
"""

from __future__ import annotations

import dataclasses

from absl import flags

from lingvo_gshard.api.export import FORMATS, check_format
from lingvo_gshard.api.run import Run
from lingvo_gshard.export.new_directory import check_output
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.flags.run import define_logdir_flag, required_logdir

NAME = "gshard-export"


def define_flags() -> flags.FlagValues:
    """Returns this command's flags."""
    values = flags.FlagValues()
    define_logdir_flag(values)
    flags.DEFINE_string("output", None, "The new directory.", flag_values=values)
    flags.DEFINE_string("format", None, f"What to write: {', '.join(FORMATS)}.", flag_values=values)
    output.define_json_flag(values, "what was written: files, bytes, seconds")
    return values


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = define_flags()
    startup.parse_flags(values, argv, __doc__)
    logdir = required_logdir(values)
    if not values.output:
        raise ValueError("--output is missing: the directory to write")
    if not values.format:
        raise ValueError(f"--format is missing: {', '.join(FORMATS)}")
    check_format(values.format)
    check_output(values.output)
    output.check_writable(values, "json")
    exported = Run(logdir).export(values.output, values.format)
    console = output.make_console(values.json)
    output.say(
        console,
        f"{exported.experiment}, step {exported.step:,}: {len(exported.files)} files, "
        f"{exported.bytes / 1e6:,.1f} MB in {exported.directory} as {exported.format}, "
        f"{exported.seconds:.1f} s",
    )
    record = dataclasses.asdict(exported) | {"bytes": exported.bytes}
    output.write_json(values.json, record)
    return 0
