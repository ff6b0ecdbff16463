"""The config of a MarianMTModel, for processes without lingvo_gshard and TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def config_of(sizes: Mapping[str, int], **options: Any) -> Any:
    """Returns a transformers.MarianConfig.

    Args:
      sizes: the fields of `benchmarks.decode.sizes.DenseSizes`.
      options: further fields of the config; they override what follows from the sizes.
    """
    import transformers  # pyright: ignore[reportMissingImports]

    fields = {
        "vocab_size": sizes["vocabulary_size"],
        "d_model": sizes["model_dim"],
        "encoder_layers": sizes["encoder_layers"],
        "decoder_layers": sizes["decoder_layers"],
        "encoder_attention_heads": sizes["num_heads"],
        "decoder_attention_heads": sizes["num_heads"],
        "encoder_ffn_dim": sizes["encoder_hidden"],
        "decoder_ffn_dim": sizes["decoder_hidden"],
        "max_position_embeddings": sizes["positions"],
        "activation_function": "relu",
    }
    return transformers.MarianConfig(**(fields | options))
