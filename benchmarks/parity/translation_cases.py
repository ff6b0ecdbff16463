"""The cases of `python -m benchmarks parity` that translate."""

from __future__ import annotations

from typing import Any

from benchmarks.parity.case import Case

_T5_SIZES = {
    "vocab_size": 320,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def _t5(option: str, **config: Any) -> Case:
    return Case(option, "t5", config, _T5_SIZES, (0,))


_SWITCH_SIZES = {
    **_T5_SIZES,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_experts": 4,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
}
_FAIRSEQ_SIZES = {
    "vocab_size": 320,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 64,
}
_M2M_SIZES = {
    **_FAIRSEQ_SIZES,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_MOE_SIZES = {
    **_M2M_SIZES,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "num_experts": 4,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 4,
}
_MARIAN_SIZES = {
    **_FAIRSEQ_SIZES,
    "pad_token_id": 319,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
    "decoder_start_token_id": 319,
}
# The token of a language, which M2M-100 and NLLB predict first.
_LANGUAGE = 300


def _switch(option: str, **config: Any) -> Case:
    return Case(option, "switch_transformers", config, _SWITCH_SIZES, (0,))


def _m2m(option: str, **config: Any) -> Case:
    return Case(option, "m2m_100", config, _M2M_SIZES, (2, _LANGUAGE))


def _moe(option: str, **config: Any) -> Case:
    return Case(option, "nllb-moe", config, _MOE_SIZES, (2, _LANGUAGE))


def _marian(option: str, **config: Any) -> Case:
    start = config.get("decoder_start_token_id", _MARIAN_SIZES["decoder_start_token_id"])
    return Case(option, "marian", config, _MARIAN_SIZES, (start,))


TRANSLATION_CASES = (
    _m2m("shared and scaled table, language first"),
    _m2m(
        "unscaled table, GELU",
        scale_embedding=False,
        activation_function="gelu",
        decoder_layers=1,
    ),
    _marian("shared table, bias of logits", scale_embedding=True, activation_function="swish"),
    _marian(
        "two vocabularies",
        decoder_vocab_size=320,
        vocab_size=344,
        share_encoder_decoder_embeddings=False,
        pad_token_id=318,
        decoder_start_token_id=318,
    ),
    _marian(
        "two vocabularies, softmax of its own",
        decoder_vocab_size=300,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
        pad_token_id=299,
        decoder_start_token_id=299,
    ),
    _moe("experts in every second and fourth layer"),
    _moe("biased router, no dropout of experts", router_bias=True, moe_token_dropout=0.0),
    _switch("experts in every second layer"),
    _switch(
        "experts in each layer, biased router",
        num_sparse_encoder_layers=4,
        num_sparse_decoder_layers=4,
        router_bias=True,
    ),
    _switch(
        "experts in every third layer, GELU",
        num_layers=6,
        num_decoder_layers=6,
        dense_act_fn="gelu",
    ),
    _t5("tied and scaled softmax"),
    _t5(
        "gated activations, softmax of its own",
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    _t5(
        "gated SiLU, one layer of the decoder", feed_forward_proj="gated-silu", num_decoder_layers=1
    ),
    Case(
        "a bias of positions in each layer", "umt5", {"feed_forward_proj": "relu"}, _T5_SIZES, (0,)
    ),
    Case(
        "gated activations, softmax of its own",
        "umt5",
        {"tie_word_embeddings": False},
        _T5_SIZES,
        (0,),
    ),
    Case("learned positions, norms of embeddings", "mbart", {}, _M2M_SIZES, (2, _LANGUAGE)),
    Case(
        "scaled table",
        "mbart",
        {"scale_embedding": True, "decoder_layers": 1},
        _M2M_SIZES,
        (2, _LANGUAGE),
    ),
    Case("tied softmax without a scale", "mt5", {"num_decoder_layers": 3}, _T5_SIZES, (0,)),
)
