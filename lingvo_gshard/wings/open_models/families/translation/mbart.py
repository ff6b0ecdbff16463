"""mBART (arXiv 2001.08210) and mBART-50 (arXiv 2008.00401), with learned positions."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import LearnedPositions
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.family import Family
from lingvo_gshard.wings.open_models.families.translation.fairseq import (
    FAIRSEQ,
    fairseq_config,
    fairseq_task,
)

# fairseq numbers the first position with 2. The rows before it have no use.
_FIRST = 2


def _task(config: PublishedConfig) -> Params:
    task = fairseq_task(config)
    positions = LearnedPositions.params().set(
        max_length=task.positions.max_length, first_position=_FIRST
    )
    for stack in (task.encoder, task.decoder):
        stack.has_input_norm = True
    return task.set(
        positions=positions, share_positions=False, tie_softmax=True, use_logit_bias=True
    )


def _config(task: Params) -> dict[str, Any]:
    return {**fairseq_config(task), "tie_word_embeddings": task.tie_softmax}


FAMILY = Family(model_type="mbart", read_task=_task, config_of=_config, **FAIRSEQ)
