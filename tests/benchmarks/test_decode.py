# tests: /benchmarks/decode/
"""python -m benchmarks decode: the sizes of dense models, and other engines on tiny ones."""

import os

import pytest

from benchmarks.decode import measure, peers, sizes
from benchmarks.peer_python import find_python
from lingvo_gshard.core.config import registry
from tests.benchmarks.test_decode_measure import tiny_cases, tiny_models


def test_a_dense_model_has_the_active_flops_of_the_quickstart():
    model = measure.initial_model(registry.get("translation.quickstart"))
    dense = sizes.dense_sizes(model.task, model.facts)
    assert (dense.model_dim, dense.encoder_layers, dense.vocabulary_size) == (128, 2, 4000)
    # A layer of 512, one of 2 experts of 512, and a router of 128 x 8 in float32.
    assert dense.decoder_hidden == (512 + 2 * 512 + 8 * 128 // (2 * 128)) / 2


def test_peers_decode_the_same_tokens():
    python = find_python(os.environ.get("PEERS_PYTHON"), peers.LIBRARIES)
    if not python:
        pytest.skip("the extra `peers` is not installed, and PEERS_PYTHON names no Python with it")
    models, found = tiny_models(), tiny_cases()
    dense = {name: sizes.dense_sizes(model.task, model.facts) for name, model in models.items()}
    with peers.Peers(python, dense, found, 1) as running:
        for case in found:
            for engine in running.engines:
                # It fails if the number of tokens differs.
                assert running.decode(engine, case) > 0
