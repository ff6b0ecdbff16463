# tests: wings/preparation/read_rows.py, wings/preparation/part_readers.py
# tests: wings/preparation/sources.py
"""Tests that bad input is refused with file and place or, if asked for, skipped and counted."""

import gzip
import lzma
import pathlib

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lingvo_gshard.data.sources import readers
from lingvo_gshard.wings.preparation import part_readers, parts, read_rows
from lingvo_gshard.wings.preparation import sources as survey
from tests.preparation import raw

GOOD = raw.rows(120)
LINES = [("\t".join(row) + "\n").encode() for row in GOOD]


def _counts(prepared):
    return {one.reason: one.rows for one in prepared.rejections}


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b"de\tgr\xf6n\tgreen\n", "not UTF-8", "byte 5 of the line is 0xf6"),
        (b"de\tein\0er\tone\n", "NUL bytes", "no text has any"),
        (b"de\tgreen\n", "wrong number of columns", "2, expected 3"),
        (b"../de\tein\tone\n", part_readers.NO_LANGUAGE, "'../de'"),
        (b"de\t" + b"x" * 1_500_000 + b"\tx\n", readers.LONG_LINE, "more than max_line_bytes"),
    ],
    ids=["latin-1", "nul", "columns", "language", "long"],
)
def test_a_bad_row(tmp_path, line, reason, detail):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"".join([*LINES[:70], line, *LINES[70:]]))
    with pytest.raises(ValueError, match=f"^{path}:71: {reason}: .*{detail}.*`on_bad_row=skip`"):
        raw.run(tmp_path, [str(path)])
    # The work goes on from where the first run stopped.
    directory, prepared = raw.run(tmp_path, [str(path)], on_bad_row="skip")
    assert _counts(prepared) == {reason: 1}
    assert prepared.rejections[0].examples[0].startswith(f"{path}:71: {detail}")
    assert len(raw.texts(directory)) == 120


def test_files_of_two_columns_are_read_with_a_language_after_a_refusal(tmp_path):
    path = raw.write_tsv(tmp_path / "pairs.tsv", [row[1:] for row in raw.rows(120, ("de",))])
    with pytest.raises(ValueError, match="Files of two columns need language=CODE of their source"):
        raw.run(tmp_path, [path])
    directory, prepared = raw.run(tmp_path, [f"{path},language=de"], held_out_per_mille=0)
    assert not prepared.rejections
    assert [row[1:] for row in raw.texts(directory)] == sorted(raw.rows(120, ("de",)))


_COMPRESS = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("suffix", _COMPRESS)
def test_a_truncated_archive(tmp_path, suffix):
    lines = [("\t".join(row) + "\n").encode() for row in raw.rows(20_000)]
    content = _COMPRESS[suffix](b"".join(lines))
    path = tmp_path / f"pairs.tsv.{suffix}"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"^{path}:[0-9]+: the file cannot be read: "):
        raw.run(tmp_path, [str(path)], held_out_per_mille=0)
    _, prepared = raw.run(tmp_path, [str(path)], on_bad_row="skip", held_out_per_mille=0)
    assert _counts(prepared) == {"the file cannot be read": 1}
    assert 1000 < sum(map(prepared.rows, prepared.splits)) < 20_000


@pytest.mark.parametrize("suffix", _COMPRESS)
def test_a_whole_archive(tmp_path, suffix):
    path = tmp_path / f"pairs.tsv.{suffix}"
    # Two members, one after another, as `cat` makes of two archives.
    halves = (_COMPRESS[suffix](b"".join(part)) for part in (LINES[:60], LINES[60:]))
    path.write_bytes(b"".join(halves))
    directory, prepared = raw.run(tmp_path, [str(path)])
    assert len(raw.texts(directory)) == 120
    assert prepared.sources[0].name == "pairs"


def test_sides_of_unequal_length(tmp_path):
    good = raw.write_tsv(tmp_path / "good.tsv", GOOD)
    (tmp_path / "train.de").write_text("eins\nzwei\n")
    (tmp_path / "train.en").write_text("one\ntwo\nthree\n")
    sources = [good, f"{tmp_path}/train,format=moses"]
    message = f"^{tmp_path}/train.de:3: sides of unequal length: it ends after 2 lines"
    with pytest.raises(ValueError, match=message):
        raw.run(tmp_path, sources)
    _, prepared = raw.run(tmp_path, sources, on_bad_row="skip")
    assert _counts(prepared)["sides of unequal length"] == 3


def test_an_empty_source(tmp_path):
    good = raw.write_tsv(tmp_path / "good.tsv", GOOD)
    (tmp_path / "none.tsv").touch()
    sources = [good, f"{tmp_path}/none.tsv"]
    with pytest.raises(ValueError, match=f"^`source={tmp_path}/none.tsv` has no rows"):
        raw.run(tmp_path, sources)
    _, prepared = raw.run(tmp_path, sources, on_bad_row="skip")
    assert prepared.rejections[0].examples == [f"{tmp_path}/none.tsv"]


def test_a_language_without_rows(tmp_path):
    path = raw.write_tsv(tmp_path / "pairs.tsv", [*GOOD, ("fi", "sama", "Sama")])
    message = "^No row of the language fi is left of 1: 1 dropped: both sides are identical "
    with pytest.raises(ValueError, match=message):
        raw.run(tmp_path, [path])
    _, prepared = raw.run(tmp_path, [path], on_bad_row="skip")
    assert prepared.languages["fi"].kept == {}


def test_no_training_row(tmp_path):
    path = raw.write_tsv(tmp_path / "pairs.tsv", [("fi", "sama", "Sama")])
    with pytest.raises(ValueError, match="^No training row is left of 1: "):
        raw.run(tmp_path, [path])


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    good = raw.write_tsv(tmp_path / "good.tsv", GOOD[:100])
    path = tmp_path / "pairs.tsv"
    read = read_rows.read_part

    def change_then_read(task, job, progress, part):
        if part.source == 1:
            with open(path, "a", encoding="utf-8") as file:
                file.write("de\teins\tone\n")
        return read(task, job, progress, part)

    monkeypatch.setattr(read_rows, "read_part", change_then_read)
    path.write_bytes(b"".join(LINES[100:]))
    with pytest.raises(ValueError, match=f"^{path}: a file changed while it was read"):
        raw.run(tmp_path, [good, str(path)])
    with pytest.raises(ValueError, match="file .*pairs.tsv was .*, and is now|a file changed"):
        raw.run(tmp_path, [good, str(path)])
    directory, prepared = raw.run(tmp_path, [good, str(path)], on_bad_row="skip", output="other")
    assert _counts(prepared) == {"a file changed while it was read": 22}
    assert len(raw.texts(directory)) == 100


def test_a_file_that_is_touched_has_not_changed(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("de\teins\tone\n")
    found = survey.survey(str(path), survey.LINES)
    path.write_text("de\teins\tone\n")
    assert not found.has_changed()
    path.write_text("de\teins\tOne\n")
    assert found.has_changed()


def test_missing_files_are_named_with_their_flag(tmp_path):
    raw.write_tsv(tmp_path / "pairs.tsv", GOOD)
    message = f"^`source={tmp_path}/pair.tsv`: .*no such file. Did you mean '{tmp_path}/pairs.tsv'"
    with pytest.raises(ValueError, match=message):
        raw.run(tmp_path, [f"{tmp_path}/pair.tsv"])
    with pytest.raises(ValueError, match="unknown field 'splits'. Did you mean 'split'"):
        raw.run(tmp_path, ["pairs.tsv,splits=train"])
    with pytest.raises(ValueError, match="format=tvs is unknown. Did you mean 'tsv'"):
        raw.run(tmp_path, ["pairs.txt,format=tvs"])
    with pytest.raises(ValueError, match="`source=pairs.dat`: the path does not say its format"):
        raw.run(tmp_path, ["pairs.dat"])


def test_damaged_work_is_not_read(tmp_path):
    paths = [str(tmp_path / name) for name in ("good.tsv", "bad.tsv")]
    pathlib.Path(paths[0]).write_bytes(b"".join(LINES))
    pathlib.Path(paths[1]).write_bytes(b"bad\n")
    with pytest.raises(ValueError, match="wrong number of columns"):
        raw.run(tmp_path, paths)
    record = tmp_path / "out" / ".work" / f"{parts.survey_name(paths[0])}.json"
    record.write_text('{"path": "x"')
    with pytest.raises(ValueError, match=f"^{record}: damaged: .* Remove .*work"):
        raw.run(tmp_path, paths)


@pytest.mark.slow
def test_a_small_parquet_file_of_one_long_text_takes_little_memory(tmp_path):
    """A page states the text once, and 20,000 rows refer to it: together 80 GB."""
    path, count = tmp_path / "rows.parquet", 20_000
    sources = ["x" * 2**22, *(row[1] for row in GOOD)]
    targets = ["long", *(row[2] for row in GOOD)]
    numbers = pyarrow.array([0] * count + list(range(1, len(sources))), pyarrow.int32())
    columns = {
        name: pyarrow.DictionaryArray.from_arrays(numbers, values)
        for name, values in (("source", sources), ("target", targets))
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd")
    assert path.stat().st_size < 2**20
    pool = pyarrow.default_memory_pool()
    before = pool.max_memory()
    _, prepared = raw.run(tmp_path, [f"{path},language=de"], on_bad_row="skip")
    assert pool.max_memory() - before < 2**28
    assert _counts(prepared) == {readers.LONG_LINE: count}
