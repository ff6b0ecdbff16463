# tests: wings/preparation/duplicates.py, wings/preparation/cleaning/near_duplicates.py
"""Tests near duplicates of prepared data, against cleaning the same rows in memory."""

import random

from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation.cleaning import near_duplicates
from lingvo_gshard.wings.preparation.cleaning.cleaner import Cleaner
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from tests.preparation import raw


def _corpus():
    """Returns rows, many of which are earlier ones with one more word."""
    drawn = random.Random(3)
    rows = [(language, f"{s} {s}", f"{t} {t}") for language, s, t in raw.rows(80)]
    for number in range(80):
        language, source, target = drawn.choice(rows)
        rows.append((language, f"{source} {number}x", target))
    drawn.shuffle(rows)
    return rows


def _expected(path, rows, similarity):
    cleaner = Cleaner.params()
    cleaner.near_duplicates.similarity = similarity
    read = [Row(*row, path, number) for number, row in enumerate(rows, start=1)]
    kept, report = cleaner.instantiate().clean(read, "train")
    return sorted(("train", *row[:3]) for row in kept), report


def _prepare(tmp_path, path, output, **values):
    params = raw.params(tmp_path / "cache", held_out_per_mille=0, **values)
    params.cleaning.near_duplicates.similarity = 0.8
    directory = tmp_path / output
    return directory, prepare(directory, [path], PrepareOptions(params, workers=1))


def test_the_rows_are_those_of_cleaning_in_memory(tmp_path):
    rows = _corpus()
    path = raw.write_tsv(tmp_path / "pairs.tsv", rows)
    expected, report = _expected(path, rows, 0.8)
    assert report.dropped[near_duplicates.NEAR_DUPLICATE] > 40
    # Several buckets, and so many ranges of keys.
    directory, prepared = _prepare(tmp_path, path, "out", bucket_bytes=12000)
    assert raw.texts(directory) == expected
    counts = {one.reason: (one.rows, one.examples) for one in prepared.rejections}
    rejected, examples = counts[near_duplicates.NEAR_DUPLICATE]
    assert rejected == report.dropped[near_duplicates.NEAR_DUPLICATE]
    assert examples[0] == report.examples[near_duplicates.NEAR_DUPLICATE]
