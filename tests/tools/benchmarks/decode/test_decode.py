"""gshard-bench decode: its cases, the sizes of dense models, and measurements of tiny models."""

import os

import pytest

from lingvo_gshard import params as experiments  # noqa: F401
from lingvo_gshard.core.config import registry
from lingvo_gshard.tools import bench
from lingvo_gshard.tools.benchmarks.decode import cases, measure, ours, peers, sizes
from lingvo_gshard.tools.benchmarks.peer_python import find_python
from tests.inference import tiny_engine

BOS, EOS, V = tiny_engine.BOS, tiny_engine.EOS, tiny_engine.V


def tiny_models():
    translation, language = tiny_engine.translation_model(), tiny_engine.language_model()
    return {
        cases.TRANSLATION: ours.Model(
            translation.task, translation.theta, translation.task.model_facts(0, BOS, (EOS,))
        ),
        cases.LANGUAGE_MODEL: ours.Model(
            language.task, language.theta, language.task.model_facts(64, BOS, (EOS,))
        ),
    }


def tiny_cases():
    sources = [[5, 6, 7], [4, 8, 9]]
    _, beam, *_ = cases.translation_cases(sources)
    prompt = cases.Batch(((5, 6), (7, 8)), 3)
    return [beam, cases.Case("continuations", cases.LANGUAGE_MODEL, 1, (prompt,))]


def test_sentences_are_batched_by_length():
    sources = [[3] * length for length in range(1, 71)]
    greedy, beam, one, _ = cases.translation_cases(sources)
    assert [len(batch.texts) for batch in greedy.batches] == [32, 32, 6]
    assert [batch.tokens for batch in greedy.batches] == [70, 38, 6]
    assert greedy.tokens == 32 * 70 + 32 * 38 + 6 * 6
    assert (beam.beam, beam.batches) == (4, greedy.batches)
    assert [len(text) for text in one.batches[0].texts] == [32]


def test_prompts_leave_room_for_a_token():
    facts = tiny_models()[cases.LANGUAGE_MODEL].facts
    for case in cases.language_model_cases(facts):
        for batch in case.batches:
            assert 1 + len(batch.texts[0]) + batch.tokens <= facts.most_positions + 1
            assert not {BOS, EOS} & set(batch.texts[0])


def test_a_dense_model_has_the_active_flops_of_the_quickstart():
    model = ours.initial_model(registry.get("translation.quickstart"))
    dense = sizes.dense_sizes(model.task, model.facts)
    assert (dense.model_dim, dense.encoder_layers, dense.vocabulary_size) == (128, 2, 4000)
    # A layer of 512, one of 2 experts of 512, and a router of 128 x 8 in float32.
    assert dense.decoder_hidden == (512 + 2 * 512 + 8 * 128 // (2 * 128)) / 2


def test_flops_of_a_case_are_those_of_its_products():
    model = tiny_models()[cases.TRANSLATION]
    case = cases.Case("one", cases.TRANSLATION, 4, (cases.Batch(((5, 6, 7),), 2),))
    m, h, source, tokens = 8, 16, 4, 2
    moe = 2 * m * 4 + 2 * (2 * 2 * m * h)
    feed_forward = 2 * 2 * m * h + moe
    project = 4 * 2 * m * m
    encoder = source * (2 * project + feed_forward) + 2 * 2 * 2 * source * source * m
    # Cross-attention projects the memory for each layer.
    memory = 2 * 2 * 2 * source * m * m + 2 * 2 * 2 * tokens * source * m
    cross = tokens * 2 * 2 * 2 * m * m + memory
    own = tokens * 2 * project + 2 * 2 * tokens * tokens * m
    decoder = own + cross + tokens * (feed_forward + 2 * m * V)
    assert sizes.case_flops(model.task, case) == encoder + 4 * decoder


@pytest.mark.slow
def test_tiny_models_are_measured():
    found = tiny_cases()
    rows = list(measure.measure(tiny_models(), found, None, 1, 1, lambda stage: None))
    pairs = [(case, engine) for case in found for engine in measure.OURS]
    for (case, engine), row in zip(pairs, rows, strict=True):
        assert (row.case, row.engine) == (case.name, engine)
        assert (row.tokens, row.ratio) == (case.tokens, 1.0)
        assert row.tokens_per_second == pytest.approx(case.tokens / row.seconds)
        assert row.limit_share > 0


def test_peers_decode_the_same_tokens():
    python = find_python(os.environ.get("PEERS_PYTHON"), peers.LIBRARIES)
    if not python:
        pytest.skip("the extra `peers` is not installed, and PEERS_PYTHON names no Python with it")
    models, found = tiny_models(), tiny_cases()
    dense = {name: sizes.dense_sizes(model.task, model.facts) for name, model in models.items()}
    with peers.Peers(python, dense, found, 1) as running:
        for case in found:
            for engine in peers.ENGINES:
                # It fails if the number of tokens differs.
                assert running.decode(engine, case) > 0


def test_a_python_without_the_libraries_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--peers_python=.*none: this Python"):
        bench.main(["gshard-bench", "decode", f"--peers_python={tmp_path}/none"])
