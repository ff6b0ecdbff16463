# tests: wings/preparation/cleaning/near_duplicates.py
"""Tests hashes of parts of texts, against sums that Python's integers compute."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from lingvo_gshard.wings.preparation.cleaning import near_duplicates
from lingvo_gshard.wings.preparation.cleaning.near_duplicates import TextHashes

_MASK = (1 << 64) - 1


def _mixed(x):
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _hash(text):
    terms = (_mixed(ord(c)) * near_duplicates._BASE**i for i, c in enumerate(text))
    return _mixed(sum(terms) & _MASK)


@hypothesis.given(st.lists(st.text(max_size=9), min_size=1, max_size=9), st.data())
def test_a_part_has_the_hash_of_its_text(texts, data):
    hashes = TextHashes(texts)
    assert hashes.whole().tolist() == [_hash(text) for text in texts]
    joined = "".join(texts)
    begin = data.draw(st.integers(0, len(joined)))
    end = data.draw(st.integers(begin, len(joined)))
    assert hashes.of(np.array([begin]), np.array([end])).tolist() == [_hash(joined[begin:end])]


def test_different_texts_have_different_hashes():
    texts = [f"{a}{b}" for a in range(300) for b in "abcdefghij"] + ["ab" * i for i in range(1000)]
    assert len(set(TextHashes(texts).whole().tolist())) == len(set(texts))
