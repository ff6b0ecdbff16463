"""Tests features of all readers: options, splits and dividing a single file."""

import pytest

from lingvo_gshard.data import held_out
from lingvo_gshard.data.sources import tsv


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
    with pytest.raises(ValueError, match="input.corpus.on_bad_row must be .* Did you mean 'skip'"):
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
