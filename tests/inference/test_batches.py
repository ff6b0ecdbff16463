# tests: wings/inference/engine/decode_batch.py, wings/inference/engine/engine.py
# tests: wings/inference/engine/shapes.py
"""Tests large batches of texts with different lengths, and the programs that they need."""

import pytest

from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS

GREEDY = DecodingOptions(beam_size=1, most_tokens=6)
LONG = [*range(3, 13)] * 5 + [2]


@pytest.fixture(scope="module")
def model():
    return tiny_engine.translation_model()


@pytest.mark.slow
def test_a_long_source_counts_where_others_have_longer_prefixes(model):
    """32 rows of 64 positions are read in blocks, of which the long source needs the last one."""
    prefixed = [Request([4 + i % 5, 2], (BOS, 3, 4, 5, 6), GREEDY) for i in range(31)]
    with model.engine(workers=1) as engine:
        *_, answer = engine.submit_all([*prefixed, Request(LONG, (BOS, 3), GREEDY)])
        (found,) = answer.result()
    tokens, gains = tiny_engine.plain_greedy(model, LONG, [BOS, 3], 6)
    assert found.log_probabilities == pytest.approx(gains, rel=1e-4, abs=1e-5)
    assert list(found.tokens) == [token for token in tokens if token != tiny_engine.EOS]


def test_shorter_texts_use_the_programs_of_longer_ones(model):
    with model.engine(workers=1) as engine:
        # A program for 48 positions would hold the source, and one for the state's 64 serves all.
        engine.submit(Request(LONG[:40], (BOS,), GREEDY)).result()
        compiled = engine.executables.count
        engine.submit(Request([5, 6, 2], (BOS,), GREEDY)).result()
        assert engine.executables.count == compiled


@pytest.mark.slow
def test_programs_that_fit_best_are_compiled_beside_and_waited_for(model):
    """The engine of a long job: texts wait for the programs of their own sizes."""
    with model.engine(workers=2, exact=True) as engine:
        requests = [Request((4 + n % 5, 2), (BOS,), GREEDY) for n in range(20)]
        found = [answer.result()[0].tokens for answer in engine.submit_all(requests)]
    for index in range(5):
        tokens, _ = tiny_engine.plain_greedy(model, (4 + index, 2), [BOS], 6)
        assert list(found[index]) == [token for token in tokens if token != tiny_engine.EOS]
        assert found[index::5] == [found[index]] * 4
