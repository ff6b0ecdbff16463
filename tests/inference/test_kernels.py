# tests: wings/inference/programs/maker.py, wings/inference/layers/cached_fused.py
"""The engine decodes the same tokens with kernels of the hardware as without."""

import dataclasses
import functools

import numpy as np
import pytest

from lingvo_gshard.core.kernel_use import KernelUse
from lingvo_gshard.core.lazy import jax
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.inference.decoding.models import model_facts
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.engine.shapes import EngineOptions
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.programs.executables import STEPS, Executables
from lingvo_gshard.wings.inference.programs.maker import ProgramMaker, row_parts
from lingvo_gshard.wings.inference.programs.preparation import prepared_weights
from lingvo_gshard.wings.inference.requests import Request
from lingvo_gshard.wings.published_layers.latent_attention import LatentAttention
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS, EOS

# The prompt is long enough for the fused attention of prompts, and its positions for two blocks.
PROMPT = (BOS, *(3 + n * n % 9 for n in range(140)))
PROMPTS = [PROMPT, (BOS, 0, 7, 0, 8)]
GREEDY = DecodingOptions(beam_size=1, most_tokens=8)
SHARED = SelfAttention.params().set(num_key_value_heads=1, rotary_fraction=1.0, logit_cap=4.0)
NEAR = SelfAttention.params().set(window=20, rotary_fraction=1.0, use_sinks=True)
LATENT = LatentAttention.params().set(
    query_rank=6, key_value_rank=6, plain_dim=4, rotary_dim=2, value_dim=4
)
BIASED = SelfAttention.params().set(relative_buckets=8, relative_max_distance=40)
MODELS = {
    "biased": {"decoder__layer__self_attention": BIASED},
    "shared": {"decoder__layer__self_attention": SHARED},
    "windows": {"decoder__attention_pattern": (NEAR, NEAR.copy().set(window=0))},
    "latent": {"decoder__layer__self_attention": LATENT},
}
CACHE = "attention over the cache"


def with_noise(theta):
    """Returns weights with noise in place of zeros, which would hide what a bias does."""
    generator = np.random.default_rng(5)

    def noisy(weight):
        return weight if np.any(weight) else weight + generator.normal(size=weight.shape)

    return theta.transform(lambda weight: noisy(np.array(weight)).astype(np.float32))


@functools.cache
def decoded(name, platform, mesh="", options=GREEDY):
    """Returns the answers to all prompts, and what the programs record of kernels.

    Args:
      name: a name of MODELS.
      platform: platform of the kernels; "" for none.
      mesh: the mesh; empty for one device.
      options: how to choose tokens.
    """
    model = tiny_engine.language_model(add_positions=False, **MODELS[name])
    facts = dataclasses.replace(model_facts(model.task, 256, BOS, (EOS,)), most_steps=5)
    partitioning = Partitioning.make(mesh, "expert_tensor") if mesh else None
    maker = ProgramMaker(model.task, facts, partitioning, platform=platform)
    made = {}

    def make(key):
        made[key] = maker.make(key)
        return made[key]

    devices = jax.devices()[: partitioning.mesh.size if partitioning else 1]
    executables = Executables(make, devices, parts=row_parts(partitioning))
    theta = with_noise(model.theta)
    weights = prepared_weights(executables, theta)[1]
    with Engine(facts, executables, weights, EngineOptions(workers=1)) as engine:
        answers = engine.submit_all([Request([], prompt, options) for prompt in PROMPTS])
        found = [answer.result()[0] for answer in answers]
    uses = {use for program in made.values() for use in program.kernels}
    steps = [program for key, program in made.items() if key.name == STEPS]
    return found, uses, steps


def check(name, platform, mesh="", options=GREEDY):
    """Compares with the answers without kernels; returns what the programs record."""
    found, uses, steps = decoded(name, platform, mesh, options)
    expected, none, _ = decoded(name, "", "", options)
    assert none == set()
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.log_probabilities == pytest.approx(other.log_probabilities, rel=1e-4, abs=1e-5)
    return uses, steps


@pytest.mark.slow
def test_decoding_with_shared_heads_equals_that_without_kernels():
    uses, steps = check("shared", "tpu_interpreted")
    path = "decoder.layers[0].self_attention"
    assert {KernelUse(path, CACHE), KernelUse(path, "attention")} <= uses
    for program in steps:
        caches = [array for array in program.inputs if array.path.startswith("state.caches[0]")]
        assert len(caches) == 2, "one block of keys and one of values"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "platform", "mesh"),
    [
        ("shared", "cuda_interpreted", ""),
        ("windows", "tpu_interpreted", ""),
        ("windows", "cuda_interpreted", "data=2,model=2"),
        ("latent", "tpu_interpreted", "data=1,model=2"),
        ("latent", "cuda_interpreted", ""),
        # One head of keys, which two devices cannot split.
        ("shared", "tpu_interpreted", "data=2,model=2"),
    ],
)
def test_other_caches_decode_the_same(name, platform, mesh):
    uses, _ = check(name, platform, mesh)
    assert {use.obstacle for use in uses if use.kernel == CACHE} == {""}


@pytest.mark.slow
def test_prompts_with_learned_biases_use_a_kernel_and_new_tokens_do_not():
    uses, _ = check("biased", "cuda_interpreted")
    assert KernelUse("decoder.layers[0].self_attention", "attention") in uses
    assert {use.obstacle for use in uses if use.kernel == CACHE} == {"it has a learned bias"}


@pytest.mark.slow
def test_a_beam_decodes_with_operations_and_says_why():
    beam = DecodingOptions(beam_size=2, most_tokens=4)
    uses, _ = check("shared", "tpu_interpreted", options=beam)
    found = {use.obstacle for use in uses if use.kernel == CACHE}
    assert found == {"its tokens see the slots of a beam or of a memory"}
