# tests: /benchmarks/decode/measure.py
"""python -m benchmarks decode: its cases, their FLOPs, and measurements of tiny models."""

import pytest

from benchmarks.decode import measure
from lingvo_gshard.core.progress import SILENT
from lingvo_gshard.wings.inference.decoding.models import model_facts
from tests.inference import tiny_engine

BOS, EOS, V = tiny_engine.BOS, tiny_engine.EOS, tiny_engine.V


def tiny_models():
    translation, language = tiny_engine.translation_model(), tiny_engine.language_model()
    return {
        measure.TRANSLATION: measure.Model(
            translation.task, translation.theta, model_facts(translation.task, 0, BOS, (EOS,))
        ),
        measure.LANGUAGE_MODEL: measure.Model(
            language.task, language.theta, model_facts(language.task, 64, BOS, (EOS,))
        ),
    }


def tiny_cases():
    sources = [[5, 6, 7], [4, 8, 9]]
    _, beam, *_ = measure.translation_cases(sources)
    prompt = measure.Batch(((5, 6), (7, 8)), 3)
    return [beam, measure.Case("continuations", measure.LANGUAGE_MODEL, 1, (prompt,))]


def test_sentences_are_batched_by_length():
    sources = [[3] * length for length in range(1, 71)]
    greedy, beam, one, _ = measure.translation_cases(sources)
    assert [len(batch.texts) for batch in greedy.batches] == [32, 32, 6]
    assert [batch.tokens for batch in greedy.batches] == [70, 38, 6]
    assert greedy.tokens == 32 * 70 + 32 * 38 + 6 * 6
    assert (beam.beam, beam.batches) == (4, greedy.batches)
    assert [len(text) for text in one.batches[0].texts] == [32]


def test_prompts_leave_room_for_a_token():
    facts = tiny_models()[measure.LANGUAGE_MODEL].facts
    for case in measure.language_model_cases(facts):
        for batch in case.batches:
            assert 1 + len(batch.texts[0]) + batch.tokens <= facts.most_positions + 1
            assert not {BOS, EOS} & set(batch.texts[0])


def test_flops_of_a_case_are_those_of_its_products():
    model = tiny_models()[measure.TRANSLATION]
    case = measure.Case("one", measure.TRANSLATION, 4, (measure.Batch(((5, 6, 7),), 2),))
    m, h, source, tokens = 8, 16, 4, 2
    moe = 2 * m * 4 + 2 * (2 * 2 * m * h)
    feed_forward = 2 * 2 * m * h + moe
    project = 4 * 2 * m * m
    encoder = source * (2 * project + feed_forward) + 2 * 2 * 2 * source * source * m
    # Cross-attention projects the memory for each layer.
    memory = 2 * 2 * 2 * source * m * m + 2 * 2 * 2 * tokens * source * m
    cross = tokens * 2 * 2 * 2 * m * m + memory
    visible = tokens * (tokens + 1) // 2
    own = tokens * 2 * project + 2 * 2 * 2 * visible * m
    decoder = own + cross + tokens * (feed_forward + 2 * m * V)
    assert measure.case_flops(model.task, case) == encoder + 4 * decoder


@pytest.mark.slow
def test_tiny_models_are_measured():
    found = tiny_cases()
    rows = list(measure.measure(tiny_models(), found, None, 1, 1, SILENT))
    pairs = [(case, engine) for case in found for engine in measure.OURS]
    for (case, engine), row in zip(pairs, rows, strict=True):
        assert (row.case, row.engine) == (case.name, engine)
        assert (row.tokens, row.ratio) == (case.tokens, 1.0)
        assert row.tokens_per_second == pytest.approx(case.tokens / row.seconds)
        assert row.limit_share > 0
