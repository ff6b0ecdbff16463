"""Params of attentions with each option alone, and with all of them together."""

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.attention.cross_attention import CrossAttention
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from lingvo_gshard.wings.long_inputs.ring import RingKernel
from lingvo_gshard.wings.published_layers.compressed_attention import CompressedAttention
from lingvo_gshard.wings.published_layers.gated_delta_net import GatedDeltaNet
from lingvo_gshard.wings.published_layers.heads_norms import HeadsRMSNorm
from lingvo_gshard.wings.published_layers.indexed_attention import IndexedAttention
from lingvo_gshard.wings.published_layers.kimi_delta_attention import KimiDeltaAttention
from lingvo_gshard.wings.published_layers.latent_attention import LatentAttention
from lingvo_gshard.wings.published_layers.mamba import Mamba2
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention
from lingvo_gshard.wings.published_layers.rotary_scaling import ProportionalScaling, YarnScaling

EACH: dict[str, dict] = {
    "grouped": {"num_key_value_heads": 2},
    "multi_query": {"num_key_value_heads": 1},
    "qk_norm": {"qk_norm": True},
    "rotary": {"rotary_fraction": 1.0},
    "part_rotary": {"rotary_fraction": 0.5, "rotary_base": 50.0},
    "relative": {"relative_buckets": 8, "relative_max_distance": 5},
    "window": {"window": 2},
    "cap": {"logit_cap": 0.7},
    "biases": {
        "num_key_value_heads": 2,
        "use_bias": True,
        "use_output_bias": True,
        "query_scale": 0.6,
        "use_sinks": True,
        "has_output_gate": True,
    },
    "published": {
        "num_key_value_heads": 2,
        "use_bias": True,
        "qk_norm": True,
        "query_key_norm": HeadsRMSNorm.params().set(epsilon=0.1, zero_centered=True),
        "rotary_fraction": 0.75,
        "rotary_pairs": "neighbors",
        "rotary_scaling": YarnScaling.params().set(factor=4.0, original_length=16, beta_fast=2.0),
    },
    "warm": {
        "temperature_floor": 2,
        "temperature_scale": 0.5,
        "value_dim": 5,
        "value_scale": 0.7,
    },
    "warm_from_0": {"temperature_floor": 3, "temperature_offset": 0, "temperature_scale": 0.5},
    "keys_for_values": {
        "num_key_value_heads": 2,
        "use_bias": True,
        "qk_norm": True,
        "rotary_fraction": 1.0,
        "rotary_scaling": ProportionalScaling.params().set(share=0.5),
        "has_value_weight": False,
        "normalizes_values": True,
        "has_output_gate": True,
    },
    "together": {
        "num_key_value_heads": 2,
        "qk_norm": True,
        "rotary_fraction": 0.5,
        "relative_buckets": 8,
        "relative_max_distance": 5,
        "window": 5,
        "logit_cap": 0.5,
    },
}


def plain(kind: type = SelfAttention, **values: object) -> Params:
    """Returns the Params of an attention with 2 heads and M = 8."""
    return kind.params().set(model_dim=8, num_heads=2, **values)


def attention(name: str, **values: object) -> Params:
    """Returns the Params of a self-attention with the options EACH[name], 4 heads and M = 8."""
    options = {**EACH[name], **values}
    is_plain = options.keys() <= dict(SelfAttention.params().items()).keys()
    p = (SelfAttention if is_plain else PublishedAttention).params()
    return p.set(model_dim=8, num_heads=4, head_dim=8, **options)


def cross_attention(name: str) -> Params:
    """Returns the Params of a cross-attention with the options of EACH[name] that it has."""
    p = CrossAttention.params().set(model_dim=8, num_heads=4, head_dim=8)
    return p.set(**{option: value for option, value in EACH[name].items() if option in p})


def latent(**values: object) -> Params:
    """Returns the Params of a latent attention with 2 heads and M = 8."""
    p = LatentAttention.params().set(model_dim=8, num_heads=2, is_causal=True, query_rank=6)
    p.set(key_value_rank=5, plain_dim=4, rotary_dim=2, value_dim=3, rotary_pairs="neighbors")
    return p.set(**values)


def indexed(**values: object) -> Params:
    """Returns the Params of `latent` with an indexer that chooses 3 keys."""
    p = IndexedAttention.params()
    for name, value in latent().items():
        p.set(**{name: value})
    return p.set(index_heads=8, index_dim=4, index_topk=3).set(**values)


def compressed(**values: object) -> Params:
    """Returns the Params of an attention with 2 heads to windows of 2, of which it chooses 2."""
    p = CompressedAttention.params().set(model_dim=8, num_heads=2, is_causal=True, window=3)
    p.set(query_rank=5, head_dim=6, rotary_dim=4, rotary_pairs="neighbors", output_rank=4)
    p.set(compressed=2, overlaps=True, index_heads=8, index_dim=4, index_topk=2)
    return p.set(**values)


def delta_net(**values: object) -> Params:
    """Returns the Params of a gated delta net with 2 heads of keys, 4 values and M = 8."""
    p = GatedDeltaNet.params().set(model_dim=8, num_heads=2, values_per_head=2, head_dim=3)
    return p.set(value_dim=5, chunk_size=4, is_causal=True).set(**values)


def kimi(**values: object) -> Params:
    """Returns the Params of `delta_net` with decays by channel, of a low rank."""
    p = KimiDeltaAttention.params()
    for name, value in delta_net().items():
        p.set(**{name: value})
    return p.set(gate_rank=4).set(**values)


def mamba(**values: object) -> Params:
    """Returns the Params of a Mamba2 with 2 groups of 2 heads and M = 8."""
    p = Mamba2.params().set(model_dim=8, num_groups=2, num_heads=2, head_dim=3, value_dim=5)
    return p.set(chunk_size=4, is_causal=True).set(**values)


def blocks() -> Params:
    """Returns the Params of a causal blockwise attention with all options that it supports."""
    p = attention("together", relative_buckets=0, is_causal=True)
    kernel = BlockwiseKernel.params().set(block_size=4)
    return p.set(logit_cap=2.0, window=3, kernel=kernel, use_sinks=True)


def ring() -> Params:
    """Returns the Params of `blocks` with a ring kernel."""
    return blocks().set(kernel=RingKernel.params().set(block_size=2))
