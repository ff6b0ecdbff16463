"""The family of M2M-100 (arXiv 2010.11125) and of the dense NLLB models (arXiv 2207.04672)."""

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


def m2m_100_task(config: PublishedConfig) -> Params:
    """Returns the task of an M2M-100 model. Each text begins with the token of its language."""
    task = fairseq_task(config)
    # fairseq numbers the first position with the padding's id plus 1.
    first = config.get("pad_token_id", kind=int, least=0) + 1
    task.positions.set(first_position=first, reaches_base=True)
    return task.set(tie_softmax=True)


def m2m_100_config(task: Params) -> dict[str, Any]:
    """Returns what `m2m_100_task` reads, from the Params of a task."""
    return {
        **fairseq_config(task),
        "pad_token_id": max(task.positions.first_position - 1, 0),
        "tie_word_embeddings": task.tie_softmax,
    }


FAMILY = Family(model_type="m2m_100", read_task=m2m_100_task, config_of=m2m_100_config, **FAIRSEQ)
