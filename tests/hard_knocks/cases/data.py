"""Data that is missing, damaged, or not what the settings say.

Most rows are slow: tests/data/ has the same errors in process.
"""

import struct

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import folder, write

_FROM_FILES = "gshard-train --experiment=translation.from_files --logdir=run --steps=1 "
_TRAIN = _FROM_FILES + "--gin_param='input.corpus.train = (\"all.tsv\",)' "
_SKIP = "--gin_param='input.corpus.on_bad_row = \"skip\"' "
_CATALOG = (
    _FROM_FILES
    + "--gin_param='input.corpus = @lingvo_gshard.wings.preparation.formats.gettext.GettextReader' "
    + "--gin_param='input.corpus.train = (\"de.mo\",)' "
)
_PREPARE = "gshard-prepare --output=out "
_GOOD = "de\tDas Haus ist alt.\tThe house is old.\n"
_RUN = ("run", "run/*")
_SET_SKIP = ". Set input.corpus.on_bad_row='skip' to leave such rows out, counted."

CASES = (
    Case(
        "a path into an archive",
        "gshard-train --experiment=translation.from_files --logdir=run "
        "--input.corpus.train=\"('corpus.zip/a.tsv',)\"",
        given=(write("corpus.zip", "PK"),),
        error="input.corpus.train: corpus.zip/a.tsv: corpus.zip is a file. If it is an archive, "
        "unpack it, or give it to gshard-prepare: --source='corpus.zip/a.tsv'",
        changes=("run", "run/*"),
    ),
    Case(
        "a glob within an archive",
        "gshard-train --experiment=translation.from_files --logdir=run "
        "--input.corpus.train=\"('corpus.zip/**/*.tsv',)\"",
        given=(write("corpus.zip", "PK"),),
        error="input.corpus.train: corpus.zip/**/*.tsv: corpus.zip is a file. If it is an archive, "
        "unpack it, or give it to gshard-prepare: --source='corpus.zip/**/*.tsv'",
        changes=("run", "run/*"),
    ),
    Case(
        "a training file that is missing",
        _TRAIN + _SKIP,
        error="input.corpus.train: all.tsv: no such file",
        changes=_RUN,
        slow=True,
    ),
    Case(
        "a development file that is missing, while bad rows are skipped",
        _TRAIN + _SKIP + "--gin_param='input.corpus.dev = (\"dev.tsv\",)'",
        given=(write("all.tsv", _GOOD), write("de.tsv", _GOOD)),
        error="input.corpus.dev: dev.tsv: no such file. Did you mean 'de.tsv'?",
        changes=_RUN,
    ),
    Case(
        "a directory in place of a file",
        _TRAIN + _SKIP,
        given=(folder("all.tsv"),),
        error="input.corpus.train: all.tsv: a directory, but a file was expected; 'all.tsv/*' "
        "takes all files in it",
        changes=_RUN,
        slow=True,
    ),
    Case(
        "an empty file",
        _TRAIN,
        given=(write("all.tsv", ""),),
        error="input.corpus.train has no rows: its files are empty",
        changes=_RUN,
        slow=True,
    ),
    Case(
        "an empty language code",
        _TRAIN,
        given=(write("all.tsv", _GOOD + "\tJa\tYes\n"),),
        error="all.tsv:2: no language code: the first column is '', expected a code such as de, "
        "pt_BR or sr@latin; the second is the source, the third the target" + _SET_SKIP,
        changes=_RUN,
        slow=True,
    ),
    Case(
        "a file in UTF-16",
        _TRAIN,
        given=(write("all.tsv", _GOOD.encode("utf-16")),),
        error="all.tsv:1: not UTF-8: the file is in UTF-16: ...",
        changes=_RUN,
        slow=True,
    ),
    Case(
        "a file of zeros, as after a crash",
        _TRAIN,
        given=(write("all.tsv", bytes(100)),),
        error="all.tsv:1: NUL bytes: ...",
        changes=_RUN,
        slow=True,
    ),
    Case(
        "rows that are all longer than a batch's rows",
        _TRAIN + "--gin_param='input.source_length = 2'",
        given=(write("all.tsv", _GOOD),),
        error="No training row is left of 1: 1 dropped: more tokens than a batch's row "
        "(all.tsv:1: 'Das Haus ist alt.'). 1 row has more source tokens than "
        "input.source_length = 2. ...",
        changes=_RUN,
        slow=True,
    ),
    Case(
        "a vocabulary without room for pieces",
        _TRAIN + "--gin_param='input.vocabulary.size = 100'",
        given=(write("all.tsv", _GOOD),),
        error="input.vocabulary.size = 100 is too small: 4 ids are special and 256 stand for bytes "
        "(input.vocabulary.byte_fallback). Set it to at least 400",
        changes=_RUN,
        slow=True,
    ),
    Case(
        "a catalog that was cut off",
        _CATALOG,
        given=(write("de.mo", struct.pack("<7I", 0x950412DE, 0, 9, 28, 100, 0, 172)),),
        error="de.mo:0: damaged catalog: truncated: the table of messages ends at byte 100, but "
        "the file has 28 bytes" + _SET_SKIP,
        changes=_RUN,
    ),
    Case(
        "a source of gshard-prepare that is missing",
        _PREPARE + "--source=alll.tsv",
        given=(write("all.tsv", _GOOD),),
        error="--source=alll.tsv: alll.tsv: no such file. Did you mean 'all.tsv'?",
    ),
    Case(
        "an unknown field of a source",
        _PREPARE + "--source=all.tsv,nam=news",
        given=(write("all.tsv", _GOOD),),
        error="--source=all.tsv,nam=news: unknown field 'nam'. Did you mean 'name'?",
    ),
    Case(
        "an unknown choice for bad rows",
        _PREPARE + "--source=all.tsv --on_bad_row=skp",
        given=(write("all.tsv", _GOOD),),
        error="--on_bad_row=skp is unknown. Did you mean 'skip'?",
    ),
    Case(
        "no source for gshard-prepare",
        _PREPARE,
        error="--source is missing: name at least one file to prepare",
    ),
    Case(
        "a damaged row for gshard-prepare",
        _PREPARE + "--source=all.tsv --workers=1",
        given=(write("all.tsv", _GOOD + "de\tJa\n"),),
        error="all.tsv:2: wrong number of columns: 2, expected 3 (language, source, target) set "
        "apart by tabs. Files of two columns need language=CODE of their source, or "
        "input.corpus.language. Set --on_bad_row=skip to leave such rows out, counted.",
        changes=("out", "out/*"),
        slow=True,
    ),
)
