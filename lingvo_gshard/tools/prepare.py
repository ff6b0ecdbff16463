"""Prepares raw text for training: cleans, divides, tokenizes and writes shards with a manifest.

    gshard-prepare --output=prepared --source=pairs.tsv
    gshard-prepare --output=prepared --source='corpus/*.tsv.zst' --workers=8
    gshard-prepare --output=prepared --source=europarl/train,format=moses \\
        --source=locale/,format=gettext,name=messages
    gshard-prepare --output=prepared --source=train.jsonl,split=train --source=dev.jsonl,split=dev
    gshard-prepare --output=prepared --source=books.txt.gz,language=en \\
        --gin_param='vocabulary.size = 16000'
    gshard-prepare --params

A --source is a path, then field=value for what differs from the defaults:

    format           tsv, csv, moses, gettext, tmx, xliff, qt, arb, properties,
                     sgm, wmt, jsonl, parquet, arrow or text; by default, from
                     the path's end
    name             what the source is called in shards and weights; by
                     default, from the path
    content          pairs, or text, which has no sources
    split            train, dev or test; by default, each row is divided by a
                     hash of its target
    language         language of rows that name none
    target_language  for Moses pairs, catalogs, translation memories and
                     messages, by default en
    document         of text: paragraph, line or file
    language_field, source_field, target_field, text_field
                     fields of JSON lines and columns of Parquet

Files are plain, .bz2, .gz, .xz or .zst, local or in a bucket (gs://, s3://), and may be globs. A
row of a TSV file is language, source and target. The prefix data/train of Moses pairs finds
data/train.en and every data/train.<language>.

The stages: files are read and cleaned, duplicates removed, the vocabulary trained, rows tokenized
and shuffled, shards written. The output depends on files and settings alone, and not on --workers.
Memory depends on --workers and the setting bucket_bytes, and not on the size of the files.

A run that is stopped or killed goes on where it was if the same command is given again: unfinished
work is in the output's directory `.work`. Other settings are refused.

With --on_bad_row=refuse, the run stops at a damaged file, a bad row, or a language that cleaning
leaves no row of, and names file and line. With skip, these are left out and counted in the report.
"""

from __future__ import annotations

import rich.console
import rich.table

from lingvo_gshard.api import preparation, tables
from lingvo_gshard.core import UserError
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.flags.definitions import integer, maker, repeated, string
from lingvo_gshard.tools.flags.run import SETTINGS
from lingvo_gshard.wings.gin.binding import to_gin
from lingvo_gshard.wings.preparation.preparation import counts, notes
from lingvo_gshard.wings.services.progress import StageDisplay

define_flags = maker(
    source=repeated("Files to read. See above.", []),
    output="Directory of the prepared data.",
    workers=integer("Number of processes; 0: one for each core.", 0, 0),
    on_bad_row=string("What to do with damaged files and bad rows: refuse or skip.", "refuse"),
    on_copies=string(
        "What to do if rows of dev or test that are given stand in another split: count or refuse.",
        "count",
    ),
    work="Local directory of unfinished work; by default, .work in the output.",
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
    values = startup.parse_flags(define_flags(), argv, __doc__)
    params = preparation.preparation_params(values.gin_param, values.gin_file)
    if values.params is not None:
        print(to_gin(params, values.params), end="")
        return 0
    if not values.output:
        raise UserError("--output is missing: name the directory for the prepared data")
    output.check_writable(values, "json")
    options = preparation.PrepareOptions(
        params=params,
        workers=values.workers,
        on_bad_row=values.on_bad_row,
        on_copies=values.on_copies,
        work=values.work or "",
        beam=None if values.beam is None else tuple(values.beam),
    )
    console = output.make_console(values.json)
    with StageDisplay(console) as progress:
        manifest = preparation.prepare(values.output, values.source, options, progress)
    table = rich.table.Table("rows", "")
    table.columns[1].justify = "right"
    for description, count in counts(manifest):
        table.add_row(description, f"{count:,}")
    tables.print_table(console, table)
    for line in notes(manifest):
        output.say(console, line)
    output.write_json(values.json, manifest)
    return 0
