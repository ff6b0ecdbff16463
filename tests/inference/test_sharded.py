"""Tests that decoding over a mesh equals decoding on one device."""

import functools

import pytest

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.inference.loading import make_engine
from lingvo_gshard.inference.options import DecodingOptions
from lingvo_gshard.inference.requests import Request
from lingvo_gshard.sharding.partitioning import Partitioning
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS, EOS

# Eleven texts: no multiple of the devices.
REQUESTS = [
    Request(
        source=(3 + n % 5, 4 + n % 7, EOS),
        given=(BOS,),
        options=DecodingOptions(beam_size=2, best=2, most_tokens=6),
    )
    for n in range(11)
]


def decoded(mesh, strategy):
    """Returns (tokens, score) of the hypotheses of each request, and the engine."""
    model = tiny_engine.translation_model()
    partitioning = Partitioning.make(mesh, strategy) if mesh else None
    devices = jax.devices()[: partitioning.mesh.size] if partitioning else ()
    facts = model.task.model_facts(0, BOS, EOS)
    with make_engine(model.task, model.theta, facts, partitioning, devices) as engine:
        found = [answer.result() for answer in engine.submit_all(REQUESTS)]
    return found, engine


@functools.cache
def local():
    """Returns the hypotheses that one device finds."""
    return decoded(None, "")[0]


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("data=8", "data"),
        ("data=4,model=2", "expert_tensor"),
        pytest.param("data=4", "expert", marks=pytest.mark.slow),
        pytest.param("data=4", "fsdp", marks=pytest.mark.slow),
        pytest.param("model=2", "tensor", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_finds_what_one_device_finds(mesh, strategy):
    found, _ = decoded(mesh, strategy)
    for mine, theirs in zip(found, local(), strict=True):
        assert [h.tokens for h in mine] == [h.tokens for h in theirs]
        assert [h.score for h in mine] == pytest.approx([h.score for h in theirs], abs=1e-4)
