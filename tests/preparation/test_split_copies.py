# tests: wings/preparation/split_copies.py, wings/preparation/preparation.py
"""Compares the counts of rows that several splits share with loops over all rows."""

import json
import re

import pytest

from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from lingvo_gshard.wings.preparation.preparation import notes
from tests.preparation import raw


def folded(text):
    """Returns the words of a text in lower case."""
    return tuple(re.findall(r"[^\W\d_]+", text.casefold()))


def splits():
    """Returns train, dev and test, which share some rows, sources and targets."""
    rows = raw.rows(120)
    train, dev, test = rows[:80], rows[80:100], rows[100:]
    language, source, target = train[0]
    dev += [train[3], (language, source.upper() + "!", f"{target}, 12.")]
    test += [train[3], train[4], dev[0], ("fr" if language == "de" else "de", source, target)]
    test += [(language, f"7 {source}", rows[90][2]), (language, rows[110][1], f"({target})")]
    return {"train": train, "dev": dev, "test": test}


def counted(rows, others):
    """Returns exact and folded copies, and folded sources and targets, counted one by one."""
    same = [row in others for row in rows]
    close, sources, targets = [], [], []
    for language, source, target in rows:
        there = [(a, folded(b), folded(c)) for a, b, c in others]
        close.append((language, folded(source), folded(target)) in there)
        sources.append(any(language == a and folded(source) == b for a, b, _ in there))
        targets.append(any(folded(target) == c for _, _, c in there))
    return [sum(each) for each in (same, close, sources, targets)]


def write(folder, splits):
    """Writes the splits as TSV files and returns the sources."""
    return [
        f"{raw.write_tsv(folder / f'{split}.tsv', rows)},split={split},name=all"
        for split, rows in splits.items()
    ]


def run(tmp_path, sources, output, **options):
    """Prepares sources and returns the manifest."""
    made = PrepareOptions(raw.params(tmp_path / "cache", bucket_bytes=2000), 1, **options)
    return prepare(tmp_path / output, sources, made)


def test_copies_in_given_splits_are_counted_and_kept(tmp_path):
    texts = splits()
    sources = write(tmp_path, texts)
    found = run(tmp_path, sources, "out")
    expected = {
        pair: counted(texts[pair[0]], texts[pair[1]])
        for pair in (("dev", "train"), ("test", "train"), ("test", "dev"))
    }
    assert {
        (one.split, one.other): [one.exact, one.folded, one.source, one.target]
        for one in found.copies
    } == expected
    assert expected["dev", "train"][:2] == [1, 2] and expected["test", "train"][2] >= 3
    assert {split: found.rows(split) for split in texts} == {
        split: len(rows) for split, rows in texts.items()
    }
    written = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [one["rows"] for one in written["copies"]] == [22, 26, 26]
    line = next(line for line in notes(found) if line.startswith("Of 22 rows of dev"))
    assert line.startswith("Of 22 rows of dev, 1 are in train, 2 but for case, digits and punct")
    assert f", for example {tmp_path}/dev.tsv:21: " in line


def test_splits_that_share_rows_are_refused_if_asked(tmp_path):
    sources = write(tmp_path, splits())
    message = "Of 22 rows of dev, 1 are in train, .*`on_copies=count` prepares them all the same"
    with pytest.raises(ValueError, match=message):
        run(tmp_path, sources, "out", on_copies="refuse")
    # The work goes on from where it was refused, and is refused again once it is done.
    assert len(run(tmp_path, sources, "out").copies) == 3
    with pytest.raises(ValueError, match=message):
        run(tmp_path, sources, "out", on_copies="refuse")
    with pytest.raises(ValueError, match="`on_copies=refus` is unknown. Did you mean 'refuse'"):
        run(tmp_path, sources, "out", on_copies="refus")


def test_splits_by_a_hash_and_splits_without_copies_are_not_told_of(tmp_path):
    rows = raw.rows(120)
    parts = {"train": rows[:90], "test": [("de", "ganz anderes hier", "something else here")]}
    found = run(tmp_path, write(tmp_path, parts), "given", on_copies="refuse")
    assert [one.folded for one in found.copies] == [0]
    assert not any("rows of test" in line for line in notes(found))
    divided = run(tmp_path, [raw.write_tsv(tmp_path / "all.tsv", rows)], "divided")
    assert divided.copies == []


def test_copies_of_texts(tmp_path):
    (tmp_path / "train.txt").write_text("A first text.\n\nA second text.\n\nA third one.\n")
    (tmp_path / "test.txt").write_text("a FIRST text\n\nA second text.\n\nNothing like it.\n")
    sources = [f"{tmp_path}/{split}.txt,split={split}" for split in ("train", "test")]
    (one,) = run(tmp_path, sources, "out").copies
    assert (one.rows, one.exact, one.folded, one.source, one.target) == (3, 1, 2, 0, 2)
