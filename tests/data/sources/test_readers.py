# tests: data/sources/readers.py, data/sources/compression.py
"""Tests features of all readers: options, splits and dividing a single file."""

import gzip
import io
import lzma
import tracemalloc

import pytest
import zstandard

from lingvo_gshard.data import held_out
from lingvo_gshard.data.sources import compression, readers, tsv


def reader(**values):
    return tsv.TsvReader.params().set(**values).instantiate()


@pytest.fixture
def mixed_rows(tmp_path):
    path = tmp_path / "all.tsv"
    lines = [f"{lang}\t{lang} satz {w}a{w}\tword {w}b{w}\n" for w in words(60) for lang in "xy"]
    path.write_text("".join(lines) + "broken\n", encoding="utf-8")
    return str(path)


def words(count):
    return [chr(97 + i // 26) + chr(97 + i % 26) for i in range(count)]


def test_option_errors():
    with pytest.raises(ValueError, match="on_bad_row is 'skipp'; expected 'refuse' or 'skip'"):
        reader(train="a", on_bad_row="skipp")
    with pytest.raises(ValueError, match="input.corpus.train of the TsvReader names no file"):
        reader(dev="a")
    with pytest.raises(ValueError, match="held_out_per_mille"):
        reader(train="a", held_out_per_mille=500)


def test_unknown_split(mixed_rows):
    with pytest.raises(ValueError, match="Unknown split 'tset'. Did you mean 'test'"):
        reader(train=mixed_rows).rows("tset")
    two = reader(train=mixed_rows, dev=mixed_rows, on_bad_row="skip")
    assert two.splits == ("train", "dev")
    with pytest.raises(ValueError, match="Unknown split 'test'. Valid: dev, train"):
        two.rows("test")


def test_a_single_file_is_divided_without_loss(mixed_rows):
    r = reader(train=mixed_rows, held_out_per_mille=200, on_bad_row="skip")
    rows, left_out = {}, {}
    for split in ("test", "train", "dev"):
        rows[split] = r.rows(split)
        left_out[split] = dict(r.left_out)
    assert left_out["train"] == {"wrong number of columns": 1}
    assert left_out["test"] == left_out["dev"] == {}
    assert sum(map(len, rows.values())) == 120
    assert all(len(rows[split]) >= 10 for split in rows)
    assert rows["dev"] == [row for row in r.rows("dev") if held_out.split_of(row.target, 200)]


COMPRESSORS = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("suffix", [".gz", ".zst", pytest.param(".xz", marks=pytest.mark.slow)])
def test_a_small_file_that_holds_one_endless_line_takes_little_memory(tmp_path, suffix):
    path = tmp_path / f"bomb.tsv{suffix}"
    size = 2**28
    path.write_bytes(COMPRESSORS[suffix](b"de\tein\tone\n" + bytes(size) + b"\nde\tzwei\ttwo\n"))
    assert path.stat().st_size < size / 500
    reading = reader(train=str(path), dev=str(path), on_bad_row="skip")
    tracemalloc.start()
    rows = reading.rows("train")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [row.target for row in rows] == ["one", "two"]
    assert reading.left_out == {readers.LONG_LINE: 1}
    assert peak < 2**27


def test_zstandard_frames_follow_one_another_at_any_size():
    """The content is read in small steps, which may end within and between frames."""
    parts = [bytes([k]) * (700 * k) + bytes(range(256)) * k for k in range(1, 40)]
    stored = b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)
    with compression.decompressed("x.zst", io.BytesIO(stored)) as file:
        assert file.read() == b"".join(parts)
    with compression.decompressed("x.zst", io.BytesIO(stored[:-1])) as file:
        with pytest.raises(EOFError, match="ends before its end-of-stream marker"):
            file.read()
