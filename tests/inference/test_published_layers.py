# tests: wings/inference/decoding/models.py, wings/published_layers/latent_attention.py
# tests: wings/published_layers/gated_delta_net.py, wings/inference/layers/cached.py
# tests: wings/published_layers/compressed_attention.py, wings/published_layers/recurrence.py
# tests: wings/published_layers/gemma4_small.py
"""The engine decodes with the caches of latent attention, of windows, and with attention sinks."""

import dataclasses

import pytest

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import jax
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.inference.decoding.models import model_facts
from lingvo_gshard.wings.inference.loading import make_engine
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from lingvo_gshard.wings.published_layers.compressed_attention import CompressedAttention
from lingvo_gshard.wings.published_layers.gated_delta_net import GatedDeltaNet
from lingvo_gshard.wings.published_layers.gemma4_small import SharedKeysStack
from lingvo_gshard.wings.published_layers.kimi_delta_attention import KimiDeltaAttention
from lingvo_gshard.wings.published_layers.latent_attention import LatentAttention
from lingvo_gshard.wings.published_layers.mamba import Mamba2
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS, EOS

LATENT = LatentAttention.params().set(
    query_rank=6, key_value_rank=5, plain_dim=4, rotary_dim=2, value_dim=3
)
NEAR = SelfAttention.params().set(window=2, rotary_fraction=1.0, use_sinks=True, use_bias=True)
NET = GatedDeltaNet.params().set(num_heads=2, values_per_head=2, head_dim=3, chunk_size=4)
MAMBA = Mamba2.params().set(num_groups=2, num_heads=2, head_dim=3, value_dim=4, chunk_size=4)
KIMI = KimiDeltaAttention.params().set(num_heads=2, head_dim=3, chunk_size=4)
GATED = PublishedAttention.params().set(rotary_fraction=0.5, has_output_gate=True)
WINDOWED = CompressedAttention.params().set(
    query_rank=6, head_dim=4, rotary_dim=2, window=2, output_rank=3, compressed=3
)
CHOSEN = WINDOWED.copy().set(compressed=2, overlaps=True, index_heads=8, index_dim=4, index_topk=2)


def _borrowing() -> Params:
    """Returns Params of a stack whose last two layers borrow keys of earlier ones."""
    p = SharedKeysStack.params().set(num_layers=5, num_heads=2, hidden_dim=16, is_causal=True)
    near = PublishedAttention.params().set(window=2, rotary_fraction=1.0, num_key_value_heads=1)
    far = near.copy().set(window=0, has_output_gate=True, normalizes_values=True, qk_norm=True)
    p.layer.input_dim, p.layer_inputs.vocabulary_size = 6, tiny_engine.V
    return p.set(attention_pattern=(far, near), borrowing_last=2, moe_every=0)


MODELS = {
    "borrowed": {"decoder": _borrowing()},
    "compressed": {"decoder__attention_pattern": (WINDOWED, CHOSEN)},
    "latent": {"decoder__layer__self_attention": LATENT},
    "recurrent": {"decoder__layer__self_attention": NET},
    "kimi": {"decoder__attention_pattern": (KIMI, LATENT.copy().set(rotates=False))},
    "mamba": {"decoder__attention_pattern": (MAMBA, NEAR)},
    "gated": {"decoder__attention_pattern": (NET, GATED)},
    "alternating": {"decoder__attention_pattern": (NEAR, NEAR.copy().set(window=0))},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_decoding_equals_a_plain_search(name):
    model = tiny_engine.language_model(add_positions=False, **MODELS[name])
    greedy = DecodingOptions(beam_size=1, most_tokens=8)
    beam = DecodingOptions(beam_size=2, most_tokens=4, length_exponent=0.6)
    # Id 0 is a token as any other.
    prompts = [(BOS, 3, 4, 5, 6), (BOS,), (BOS, 0, 7, 0, 8)]
    with model.engine(workers=1) as engine:
        answers = engine.submit_all([Request([], prompt, greedy) for prompt in prompts])
        found = [answer.result()[0] for answer in answers]
        if engine.facts.has_states:
            with pytest.raises(UserError, match="one state for each text"):
                engine.submit(Request([], prompts[0], beam))
        else:
            best = engine.submit(Request([], prompts[0], beam)).result()[0]
    for prompt, one in zip(prompts, found, strict=True):
        tokens, gains = tiny_engine.plain_greedy(model, [], prompt, 8)
        assert one.log_probabilities == pytest.approx(gains, rel=1e-4, abs=1e-5)
        assert list(one.tokens) == [token for token in tokens if token != EOS]
    if engine.facts.has_states:
        return
    ended = tiny_engine.plain_beam(model, [], prompts[0], 4, 2)
    _, _, gains = tiny_engine.ranked(ended, 0.6)[0]
    assert best.log_probabilities == pytest.approx(gains, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_heads_over_two_devices_decode_the_same(name):
    model = tiny_engine.language_model(add_positions=False, **MODELS[name])
    prompt, greedy = (BOS, 3, 4, 5, 6), DecodingOptions(beam_size=1, most_tokens=8)
    facts = dataclasses.replace(model_facts(model.task, 64, BOS, (EOS,)), most_steps=5)
    split = Partitioning.make("data=2,model=2", "expert_tensor")
    with make_engine(model.task, model.theta, facts, split, jax.devices()[:4]) as engine:
        (found,) = engine.submit(Request([], prompt, greedy)).result()
    _, gains = tiny_engine.plain_greedy(model, [], prompt, 8)
    assert found.log_probabilities == pytest.approx(gains, rel=1e-4, abs=1e-5)
