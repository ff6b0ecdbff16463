"""Training files with bad rows, of other kinds than their name says, and values that suit none."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import corpus, text_corpus, write

_TRAIN = "gshard-train --experiment=translation.from_files --gin_file=small.gin --logdir=run "
_TEXT = "gshard-train --experiment=language_model.from_files --gin_file=small.gin --logdir=run "
_WRITTEN = ("run", "run/*")

CASES = (
    Case(
        "an experiment that lacks its files",
        "gshard-train --experiment=translation.from_files --logdir=run",
        changes=_WRITTEN,
        error="input.corpus: input.corpus.train of the TsvReader names no file. Set "
        "--gin_param='input.corpus.train = \"my_file\"'",
    ),
    Case(
        "a training file of empty rows",
        _TRAIN,
        given=(corpus(), write("train.tsv", "\n\n\n")),
        changes=_WRITTEN,
        error="train.tsv:1: wrong number of columns: 1, expected 3 (language, source, "
        "target) set apart by tabs. ...",
    ),
    Case(
        "a training file of spaces",
        _TRAIN,
        given=(corpus(), write("train.tsv", "   \n")),
        changes=_WRITTEN,
        error="train.tsv:1: wrong number of columns: 1, expected 3 (language, source, "
        "target) set apart by tabs. ...",
    ),
    Case(
        "a training file of one row",
        _TRAIN + "--steps=1",
        given=(corpus(), write("train.tsv", "de\tHund\tdog\n")),
        changes=_WRITTEN,
        prints=(
            "read          │ 1 │",
            "The vocabulary has ... ids: the training text of 2 sentences "
            "gives no more, though input.vocabulary.size = 300 allows them.",
            "Trained 1 steps",
        ),
        slow=True,
    ),
    Case(
        "a row without a translation",
        _TRAIN,
        given=(corpus(), write("train.tsv", "de\tHund\n")),
        changes=_WRITTEN,
        error="train.tsv:1: wrong number of columns: 2, expected 3 (language, source, "
        "target) set apart by tabs. ...",
    ),
    Case(
        "a row with a column too many",
        _TRAIN,
        given=(corpus(), write("train.tsv", "de\tHund\tdog\tcat\n")),
        changes=_WRITTEN,
        error="train.tsv:1: wrong number of columns: 4, expected 3 (language, source, "
        "target) set apart by tabs. ...",
    ),
    Case(
        "a row that is not UTF-8",
        _TRAIN,
        given=(corpus(), write("train.tsv", b"de\tH\xffnd\tdog\n")),
        changes=_WRITTEN,
        error="train.tsv:1: not UTF-8: byte 4 of the line is 0xff. Set "
        "input.corpus.on_bad_row='skip' to leave such rows out, counted.",
    ),
    Case(
        "a dev file with a bad row",
        _TRAIN,
        given=(corpus(), write("dev.tsv", "de\tHund\n")),
        changes=_WRITTEN,
        error="dev.tsv:1: wrong number of columns: 2, expected 3 (language, source, "
        "target) set apart by tabs. ...",
    ),
    Case(
        "an unknown way for bad rows",
        _TRAIN + "--gin_param='input.corpus.on_bad_row = \"drop\"'",
        given=(corpus(),),
        error="...on_bad_row is 'drop'; expected 'refuse' or 'skip'",
    ),
    Case(
        "an unknown file type",
        _TRAIN + "--gin_param='input.corpus.train = (\"train.csv\",)'",
        given=(corpus(), write("train.csv", "x")),
        changes=_WRITTEN,
        error="train.csv:1: wrong number of columns: 1, expected 3 (language, source, "
        "target) set apart by tabs. ...",
    ),
    Case(
        "no training files",
        _TRAIN + "--gin_param='input.corpus.train = ()'",
        given=(corpus(),),
        changes=_WRITTEN,
        error="input.corpus: input.corpus.train of the TsvReader names no file. Set "
        "--gin_param='input.corpus.train = \"my_file\"'",
    ),
    Case(
        "a catalog that is no catalog",
        _TRAIN + "--gin_param='input.corpus.train = (\"de.po\",)'",
        given=(corpus(), write("de.po", "msgid msgid\n")),
        changes=_WRITTEN,
        error="de.po:1: wrong number of columns: 1, expected 3 (language, source, target) "
        "set apart by tabs. ...",
    ),
    Case(
        "a compiled catalog that is none",
        _TRAIN + "--gin_param='input.corpus.train = (\"de.mo\",)'",
        given=(corpus(), write("de.mo", "x")),
        changes=_WRITTEN,
        error="de.mo:1: wrong number of columns: 1, expected 3 (language, source, target) "
        "set apart by tabs. ...",
    ),
    Case(
        "a character coverage of two",
        _TRAIN + "--gin_param='input.vocabulary.character_coverage = 2.0'",
        given=(corpus(),),
        changes=_WRITTEN,
        error="--gin_param 'input.vocabulary.character_coverage = 2.0': "
        "input.vocabulary.character_coverage is 2.0; expected a number from 0.98 to 1",
    ),
    Case(
        "a text that is not UTF-8",
        _TEXT,
        given=(text_corpus(), write("train.txt", b"\xff\xfe")),
        changes=_WRITTEN,
        error="train.txt:1: not UTF-8: the file is in UTF-16: convert it by `iconv -f "
        "UTF-16 -t UTF-8`. Set input.corpus.on_bad_row='skip' to leave such rows "
        "out, counted.",
    ),
    Case(
        "a text of NUL bytes, as after a crash",
        _TEXT,
        given=(text_corpus(), write("train.txt", bytes(100))),
        changes=_WRITTEN,
        error="train.txt:1: NUL bytes: no text has any. Set input.corpus.on_bad_row='skip' to "
        "leave such rows out, counted.",
    ),
    Case(
        "an empty text",
        _TEXT,
        given=(text_corpus(), write("train.txt", "")),
        changes=_WRITTEN,
        error="input.corpus.train has no rows: its files are empty",
    ),
    Case(
        "a text of one row",
        _TEXT + "--steps=1",
        given=(text_corpus(), write("train.txt", "a\n")),
        changes=_WRITTEN,
        prints=("read          │ 1 │", "ids: the training text of 1 sentence gives no more"),
        slow=True,
    ),
    Case(
        "a directory of vocabularies that is a file",
        _TEXT + "--steps=1 --gin_param='input.vocabulary.cache_directory = \"file\"'",
        given=(text_corpus(), write("file", "x")),
        changes=_WRITTEN,
        says="Warning: The vocabulary is not kept for later runs in "
        "input.vocabulary.cache_directory, file: a file; a directory was expected\n",
        prints=("Trained 1 steps",),
        slow=True,
    ),
    Case(
        "an unknown kind of document",
        _TEXT + "--gin_param='input.corpus.document = \"page\"'",
        given=(text_corpus(),),
        error="...document is 'page'; expected ...",
    ),
)
