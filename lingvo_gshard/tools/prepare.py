"""Prepares raw text for training: cleans, divides, tokenizes and writes shards with a manifest."""

from __future__ import annotations

import rich.table

from lingvo_gshard.api import preparation, tables
from lingvo_gshard.core import UserError
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.flags.definitions import maker, repeated
from lingvo_gshard.tools.flags.options import option_flags, read_options
from lingvo_gshard.tools.flags.run import SETTINGS
from lingvo_gshard.wings.gin.binding import to_gin
from lingvo_gshard.wings.preparation.preparation import counts, notes
from lingvo_gshard.wings.services.progress import StageDisplay

define_flags = maker(
    source=repeated("Files to read. See above.", []),
    output="Directory of the prepared data.",
    **option_flags(preparation.PrepareOptions()),
    beam=repeated(
        "Option of an Apache Beam pipeline, such as --beam=--runner=FlinkRunner; may be "
        "repeated. The work is then done by Beam, on a file system that all its workers share."
    ),
    params="Shows the settings whose names contain this text, with their meaning, as gin for "
    "--gin_file, and exits. Without a value, all.",
    **SETTINGS,
    json=output.json_flag("the manifest"),
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    params = preparation.preparation_params(values.gin_param, values.gin_file)
    if values.params is not None:
        print(to_gin(params, values.params), end="")
        return 0
    if not values.output:
        raise UserError("--output is missing: name the directory for the prepared data")
    output.check_writable(values, "json")
    beam = None if values.beam is None else tuple(values.beam)
    options = read_options(values, preparation.PrepareOptions, params=params, beam=beam)
    console = output.make_console(values.json)
    with StageDisplay(console) as progress:
        manifest = preparation.prepare(values.output, values.source, options, progress)
    table = rich.table.Table("rows", "")
    table.columns[1].justify = "right"
    for description, count in counts(manifest):
        table.add_row(description, f"{count:,}")
    tables.print_table(console, table)
    for line in notes(manifest):
        console.say(line)
    output.write_json(values.json, manifest)
    return 0
