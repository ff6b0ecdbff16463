"""The families of published models, by the `model_type` of their configs."""

from __future__ import annotations

from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families import (
    deepseek,
    gemma,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    olmoe,
    qwen3,
)
from lingvo_gshard.open_models.families.family import Family
from lingvo_gshard.open_models.families.translation import (
    m2m_100,
    marian,
    nllb_moe,
    switch,
    t5,
)

FAMILIES = {
    family.model_type: family
    for family in (
        deepseek.V2,
        deepseek.V3,
        deepseek.KIMI_K2,
        gemma.GEMMA2,
        gemma.GEMMA3,
        glm4_moe.FAMILY,
        gpt_oss.FAMILY,
        llama.FAMILY,
        mistral.DENSE,
        mistral.EXPERTS,
        olmoe.FAMILY,
        qwen3.QWEN2,
        qwen3.DENSE,
        qwen3.EXPERTS,
        m2m_100.FAMILY,
        marian.FAMILY,
        nllb_moe.FAMILY,
        switch.FAMILY,
        t5.FAMILY,
        t5.MT5,
    )
}


def family_of(config: PublishedConfig) -> Family:
    """Returns the family of a config.

    Raises:
      UserError: the architecture is unknown; the message has the nearest known one.
    """
    name = config.get("model_type", kind=str)
    if name not in FAMILIES:
        raise UserError(
            f"{config.where}: the architecture {name!r} is unknown. {names.nearest(name, FAMILIES)}"
        )
    return FAMILIES[name]


__all__ = ["FAMILIES", "Family", "family_of"]
