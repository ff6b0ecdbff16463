# tests: wings/export/stablehlo_writer.py, wings/preparation/cleaning/normalization.py
"""Tests texts in a graph: the normal form and the ids are those that Python gives."""

import random
import sys
import unicodedata

import pytest

from lingvo_gshard.wings.export.stablehlo_writer import NormalizerInGraph, VocabularyInGraph
from lingvo_gshard.wings.preparation.cleaning.normalization import Normalizer
from tests.data import corpora


@pytest.fixture(scope="module")
def texts():
    """Returns texts with every character that is special, and random ones."""
    special = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Zs", "Zl", "Zp")
    ]
    rng = random.Random(0)
    alphabet = [*special, *"abc ßéñ漢字한글", "e\u0301", "\u0301", "a\u200b\u0301", "ﬁ", "Å", "😀"]
    found = [f"a{c}b" for c in special] + ["", " ", "\u200b", "  a  "]
    return found + ["".join(rng.choices(alphabet, k=12)) for _ in range(300)]


def test_normal_form_is_that_of_training(texts):
    normal = Normalizer()
    found = [text.decode() for text in NormalizerInGraph()(texts).numpy()]
    assert found == [normal(text) for text in texts]


def test_bytes_that_are_no_utf_8_are_replaced():
    (found,) = NormalizerInGraph()([b"a\xff b"]).numpy()
    assert found.decode() == "a\ufffd b"


def test_ids_are_those_of_the_vocabulary(texts, tmp_path):
    lines = [text for row in corpora.rows(50) for text in (row.source, row.target)]
    vocabulary = corpora.trainer(tmp_path).train(corpora.rows(200), 1.0)[0]
    in_graph = VocabularyInGraph(vocabulary)
    normal = [Normalizer()(text) for text in texts] + lines
    ids = in_graph.encode(normal)
    assert ids.to_list() == vocabulary.encode_batch(normal)
    decoded = [text.decode() for text in in_graph.decode(ids).numpy()]
    assert decoded == [vocabulary.decode(row) for row in ids.to_list()]
