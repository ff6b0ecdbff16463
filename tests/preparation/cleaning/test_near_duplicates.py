"""Tests near duplicates, against exact Jaccard indices of all pairs and against datasketch."""

import itertools
import random

import datasketch
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from lingvo_gshard.data.held_out import fold
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation.cleaning import near_duplicates
from lingvo_gshard.wings.preparation.cleaning.cleaner import Cleaner
from lingvo_gshard.wings.preparation.cleaning.near_duplicates import NearDuplicates


def finder(similarity=0.8, **values):
    return NearDuplicates.params().set(similarity=similarity, **values).instantiate()


def corpus(count, seed):
    """Returns rows of random words, some of them with a few words of an earlier one replaced."""
    drawn = random.Random(seed)
    words = ["".join(drawn.choices("abcdefghijklmnop", k=6)) for _ in range(400)]
    rows = []
    for number in range(count):
        if rows and number % 2:
            text = drawn.choice(rows).target.split()
            for _ in range(drawn.randrange(2)):
                text[drawn.randrange(len(text))] = drawn.choice(words)
        else:
            text = drawn.choices(words, k=12)
        rows.append(Row(drawn.choice(["de", "fr"]), "", " ".join(text), "f", number))
    return rows


def grams(row, length=5):
    text = f"{fold(row.source)}\n{fold(row.target)}".ljust(length)
    return {text[i : i + length] for i in range(len(text) - length + 1)}


def jaccard(one, other):
    return len(grams(one) & grams(other)) / len(grams(one) | grams(other))


def similar_pairs(rows, least):
    sets = list(map(grams, rows))
    return [
        (i, j)
        for i, j in itertools.combinations(range(len(rows)), 2)
        if rows[i].language == rows[j].language
        and len(sets[i] & sets[j]) / len(sets[i] | sets[j]) >= least
    ]


def test_of_similar_rows_one_stays_and_nothing_else_is_dropped():
    rows = corpus(300, seed=1)
    dropped = set(finder().copies_among(rows))
    pairs = similar_pairs(rows, 0.8)
    assert len(pairs) > 60
    both_stay = [pair for pair in pairs if not dropped & set(pair)]
    assert len(both_stay) <= 0.02 * len(pairs)
    # Whatever is dropped has an earlier row that it is similar to.
    assert dropped <= {later for _, later in pairs}


def test_the_order_of_work_changes_nothing():
    rows = corpus(300, seed=2)
    near = finder()
    keys = near.bands(rows)
    assert np.array_equal(keys[::-1], near.bands(rows[::-1]))
    assert np.array_equal(keys, np.concatenate([near.bands([row]) for row in rows]))
    buckets = {}
    for index, row_keys in enumerate(keys.tolist()):
        for band in enumerate(row_keys):
            buckets.setdefault(band, []).append(index)
    dropped = set()
    for members in reversed(buckets.values()):
        copies = near.copies([rows[index] for index in members])
        dropped |= {members[index] for index in copies}
    assert sorted(dropped) == near.copies_among(rows)


def test_min_hashes_estimate_like_those_of_datasketch():
    rows = corpus(80, seed=3)
    near = finder(hashes=512)
    values = near._min_hashes([near._text(row) for row in rows])
    theirs = [
        datasketch.MinHash.bulk([[g.encode() for g in grams(row)]], num_perm=512)[0] for row in rows
    ]
    errors = []
    for i, j in itertools.combinations(range(len(rows)), 2):
        exact = jaccard(rows[i], rows[j])
        ours = np.mean(values[i] == values[j])
        errors.append((ours - exact, theirs[i].jaccard(theirs[j]) - exact))
    our_error, their_error = np.sqrt(np.mean(np.square(errors), axis=0))
    assert our_error < 1.2 * their_error < 0.05


@hypothesis.given(st.lists(st.text("ab 1.", max_size=7), max_size=12))
def test_any_texts(texts):
    rows = [Row("de", text, text) for text in texts]
    dropped = finder(characters=3).copies_among(rows)
    assert all(index > 0 for index in dropped)
    same = {}
    for index, row in enumerate(rows):
        first = same.setdefault(fold(row.target), index)
        # Rows that are equal but for case, digits and punctuation are similar.
        assert first == index or index in dropped


def test_languages_are_apart_and_boilerplate_ends():
    rows = [Row(language, "", "the very same text") for language in ("de", "fr", "de")]
    assert finder().copies_among(rows) == [2]
    assert finder().copies(rows * 500) == list(range(2, 1500))


@pytest.mark.parametrize(("similarity", "hashes"), [(0.5, 64), (0.8, 64), (0.9, 128), (1.0, 64)])
def test_few_near_duplicates_share_no_bucket(similarity, hashes):
    rows = near_duplicates._band_rows(similarity, hashes)
    assert (1 - similarity**rows) ** (hashes // rows) <= 0.01
    assert rows == hashes or (1 - similarity ** (rows + 1)) ** (hashes // (rows + 1)) > 0.01


def test_the_cleaner_drops_and_counts_them():
    p = Cleaner.params()
    p.near_duplicates.similarity = 0.7
    rows = [
        Row("de", "Die Datei wurde gelöscht", "The file was deleted", "a", 1),
        Row("de", "Die Datei wurde gelöscht.", "The file was deleted!", "a", 2),
        Row("de", "Ein Ordner wurde angelegt", "A folder was made", "a", 3),
    ]
    kept, report = p.instantiate().clean(rows, "train")
    assert [row.line for row in kept] == [1, 3]
    assert report.dropped == {near_duplicates.NEAR_DUPLICATE: 1}
    assert report.examples[near_duplicates.NEAR_DUPLICATE].startswith("a:2: 'Die Datei")
    assert len(p.instantiate().clean(rows, "test")[0]) == 3
