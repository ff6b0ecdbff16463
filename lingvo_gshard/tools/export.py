"""Writes a trained model for programs that do not have this package."""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags

from lingvo_gshard.api import tables
from lingvo_gshard.api.decoding.quality import table_of
from lingvo_gshard.api.export import DecoderSettings
from lingvo_gshard.api.run import Run
from lingvo_gshard.core import UserError
from lingvo_gshard.runtime import devices
from lingvo_gshard.tasks import Decoding
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.flags.definitions import comma_list, integer, maker
from lingvo_gshard.tools.flags.options import given_options, option_flags
from lingvo_gshard.tools.flags.run import CHECKPOINT, LOGDIR, precision_flag, required_logdir
from lingvo_gshard.wings.export.formats import FORMATS, format_of
from lingvo_gshard.wings.export.new_directory import check_output
from lingvo_gshard.wings.inference.decoding.precision import TRAINED
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.services.progress import StageDisplay

_SEARCH_FLAGS = ("beam_size", "length_exponent", "most_tokens")
_SEARCH_DEFAULTS = {
    "beam_size": "By default 4 to translate, 1 for a language model.",
    "length_exponent": "By default 1.",
}
_SIZE_FLAGS = ("rows", "lengths")

define_flags = maker(
    logdir=LOGDIR,
    checkpoint=CHECKPOINT,
    output="The new directory.",
    format=f"What to write: {', '.join(FORMATS)}.",
    **option_flags(DecodingOptions, _SEARCH_FLAGS, _SEARCH_DEFAULTS),
    precision=precision_flag(default=None),
    quality_rows=integer(
        "Most rows of the dev split to measure what --precision costs; 0 measures nothing.", 500, 0
    ),
    rows=comma_list("Numbers of texts that programs decode together; by default 1,8,32."),
    lengths=comma_list(
        "Numbers of tokens that programs take of a text, such as 32,128; longer texts are "
        "cut. By default 32,64,128, ... up to what the model takes."
    ),
    json=output.json_flag("what was written: files, bytes, seconds"),
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    devices.keep_pages()
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    logdir = required_logdir(values)
    if not values.output:
        raise UserError("--output is missing: the directory to write")
    if not values.format:
        raise UserError(f"--format is missing: {', '.join(FORMATS)}")
    format_of(values.format)
    check_output(values.output)
    output.check_writable(values, "json")
    console = output.make_console(values.json)
    with StageDisplay(console) as stages:
        stages.begin("Starting")
        run = Run(logdir, checkpoint=values.checkpoint)
        run.progress = stages
        decoding: Decoding | None = run.params.task.cls.DECODING
        settings = _settings(values, decoding)
        exported = run.export(values.output, values.format, settings)
    console.say(
        f"{exported.experiment}, step {exported.step:,}: {len(exported.files)} files, "
        f"{exported.bytes / 1e6:,.1f} MB in {exported.directory} as {exported.format}, "
        f"{exported.seconds:.1f} s"
    )
    record = dataclasses.asdict(exported) | {"bytes": exported.bytes}
    has_source = decoding is not None and decoding.has_source
    if settings and settings.precision != TRAINED and values.quality_rows and has_source:
        with StageDisplay(console) as run.progress:
            compared = run.compare_precisions(
                (TRAINED, settings.precision), limit=values.quality_rows, options=settings.options
            )
        console.say(f"Translations of {compared[0].rows:,} rows of dev:")
        tables.print_table(console, tables.rich_table(table_of(compared)))
        record["quality"] = [dataclasses.asdict(each) for each in compared]
    output.write_json(values.json, record)
    return 0


def _settings(values: flags.FlagValues, decoding: Decoding | None) -> DecoderSettings | None:
    """Returns how to decode as the flags say; None if none of them is given."""
    given = given_options(values, DecodingOptions)
    words = {flag: values[flag].value for flag in _SIZE_FLAGS}
    sizes = {flag: _sizes(flag, given) for flag, given in words.items() if given is not None}
    precision = {"precision": values.precision} if values.precision else {}
    if not given and not sizes and not precision:
        return None
    options = None
    if given:
        chosen: dict[str, Any] = {"beam_size": decoding.beam_size if decoding else 1, **given}
        options = DecodingOptions(**chosen)
    return DecoderSettings(options=options, **sizes, **precision)


def _sizes(flag: str, words: list[str]) -> tuple[int, ...]:
    """Returns a flag's sizes; ValueError if a word is no number."""
    try:
        return tuple(int(word) for word in words)
    except ValueError:
        raise UserError(
            f"--{flag}={','.join(words)}: numbers were expected, such as --{flag}=1,8,32"
        ) from None
