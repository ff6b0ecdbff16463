"""Marian (arXiv 1804.00344), as OPUS-MT publishes its models."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.family import Family
from lingvo_gshard.wings.open_models.families.translation.fairseq import (
    FAIRSEQ,
    fairseq_config,
    fairseq_task,
)


def _task(config: PublishedConfig) -> Params:
    task = fairseq_task(config)
    for stack in (task.encoder, task.decoder):
        stack.has_final_norm = False
        stack.layer.norm_position = "sum"
    shares = config.get("share_encoder_decoder_embeddings", False)
    if shares:
        # Without it, transformers 5 has a table for each side besides one that no layer reads.
        config.expect("tie_word_embeddings", True)
        config.expect("decoder_vocab_size", task.source_vocabulary_size)
    target = config.get("decoder_vocab_size", task.source_vocabulary_size)
    return task.set(
        target_vocabulary_size=target,
        share_embeddings=shares,
        tie_softmax=config.get("tie_word_embeddings", True),
        use_logit_bias=True,
    )


def _config(task: Params) -> dict[str, Any]:
    return {
        **fairseq_config(task),
        "vocab_size": task.source_vocabulary_size,
        "decoder_vocab_size": task.target_vocabulary_size,
        "share_encoder_decoder_embeddings": task.share_embeddings,
        "tie_word_embeddings": task.tie_softmax,
    }


FAMILY = Family(model_type="marian", read_task=_task, config_of=_config, **FAIRSEQ)
