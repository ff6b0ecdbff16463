# tests: wings/inference/layers/attention.py
"""Decodes over more devices than keys have heads: each device keeps those that its queries read."""

import functools

import pytest

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.layers import RMSNorm
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.wings.inference.decoding.models import model_facts
from lingvo_gshard.wings.inference.decoding.state import StateShape
from lingvo_gshard.wings.inference.layers.attention import cached_heads
from lingvo_gshard.wings.inference.loading import make_engine
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.programs.executables import PREPARE, STEPS, ProgramKey
from lingvo_gshard.wings.inference.requests import Request
from lingvo_gshard.wings.published_layers.heads_norms import HeadsLayerNorm, HeadsRMSNorm
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS, EOS

OPTIONS = DecodingOptions(beam_size=1, best=1, most_tokens=6)
REQUESTS = [Request(source=(), given=(BOS, 3 + n, 5), options=OPTIONS) for n in range(5)]
ROWS, LENGTH = 8, 32
ATTENTION = "decoder__layer__self_attention__"


def model(heads, key_heads, **values):
    shared = {"num_key_value_heads": key_heads, "rotary_fraction": 1.0, "head_dim": 4}
    return tiny_engine.language_model(
        **{"model_dim": 8, "decoder__num_heads": heads, "decoder__moe_every": 0},
        **{f"{ATTENTION}{name}": value for name, value in (shared | values).items()},
    )


def decoded(model, mesh="", strategy="tensor"):
    """Returns the hypotheses of each request, and the engine."""
    partitioning = Partitioning.make(mesh, strategy) if mesh else None
    devices = jax.devices()[: partitioning.mesh.size] if partitioning else ()
    facts = model_facts(model.task, LENGTH, BOS, (EOS,))
    with make_engine(model.task, model.theta, facts, partitioning, devices) as engine:
        found = [answer.result() for answer in engine.submit_all(REQUESTS)]
    return found, engine


@pytest.mark.parametrize(
    ("heads", "key_heads", "mesh", "cached"),
    [
        (8, 2, "model=4", 4),
        (4, 2, "model=4", 4),
        (8, 2, "data=2,model=4", 4),
        (12, 6, "model=4", 12),
        # A device reads all of these, or they divide evenly.
        (8, 1, "model=4", 1),
        (8, 4, "model=4", 4),
        (6, 3, "model=2", 3),
        (8, 2, "data=4", 2),
    ],
)
def test_a_cache_has_the_heads_that_devices_read(heads, key_heads, mesh, cached):
    layer = model(heads, key_heads).task.decoder.layers_in_order()[0].self_attention
    assert cached_heads(layer) == key_heads
    strategy = "data_tensor" if "model" in mesh and "data" in mesh else None
    strategy = strategy or ("tensor" if "model" in mesh else "data")
    with use_partitioning(Partitioning.make(mesh, strategy)):
        assert cached_heads(layer) == cached


VARIANTS = {
    "plain": {},
    "biases": {"use_bias": True},
    "norms": {"qk_norm": True, "query_key_norm": RMSNorm.params()},
    "norms of each head": {"qk_norm": True, "query_key_norm": HeadsLayerNorm.params()},
    "a norm over heads": {"qk_norm": True, "query_key_norm": HeadsRMSNorm.params()},
    "sinks": {"use_sinks": True},
    "a window": {"window": 2},
}


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in [*VARIANTS][1:])]
)
def test_texts_are_those_of_one_device(name):
    tiny = model(8, 2, **VARIANTS[name])
    expected, _ = decoded(tiny)
    found, engine = decoded(tiny, "model=4")
    for mine, theirs in zip(found, expected, strict=True):
        assert [h.tokens for h in mine] == [h.tokens for h in theirs]
        assert [h.score for h in mine] == pytest.approx([h.score for h in theirs], abs=1e-4)
    steps = engine.executables.get(ProgramKey(STEPS, OPTIONS.kind, StateShape(ROWS, LENGTH)))
    caches = [array for array in steps.outputs if "caches" in array.path]
    assert {(array.shape[1], array.split[1]) for array in caches} == {(4, ("model",))}
    prepared = engine.executables.program(ProgramKey(PREPARE)).outputs
    keys = {array.shape[1] for array in prepared if "w_key_value" in array.path}
    assert keys == {2 if "biases" in name or "of each head" in name or "over" in name else 4}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8"])
def test_weights_in_eight_bits_are_repeated_too(precision):
    tiny = model(8, 2)
    facts = model_facts(tiny.task, LENGTH, BOS, (EOS,))
    make = functools.partial(make_engine, tiny.task, tiny.theta, facts, precision=precision)
    texts = []
    for partitioning in (None, Partitioning.make("model=4", "tensor")):
        devices = jax.devices()[: partitioning.mesh.size] if partitioning else ()
        with make(partitioning, devices) as engine:
            answers = [answer.result() for answer in engine.submit_all(REQUESTS)]
            texts.append([h.tokens for answer in answers for h in answer])
    assert texts[0] == texts[1]
