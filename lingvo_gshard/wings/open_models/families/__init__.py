"""The families of published models, by the `model_type` of their configs."""

from __future__ import annotations

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import (
    composed,
    ernie,
    gemma,
    granite,
    hunyuan,
    llama4,
    mimo_v2,
    mistral,
    phi,
    windowed,
)
from lingvo_gshard.wings.open_models.families.deepseek import deepseek_v3, deepseek_v4
from lingvo_gshard.wings.open_models.families.family import Family
from lingvo_gshard.wings.open_models.families.hybrids import kimi_linear, nemotron_h
from lingvo_gshard.wings.open_models.families.qwen import qwen3, qwen3_next
from lingvo_gshard.wings.open_models.families.translation import (
    m2m_100,
    marian,
    mbart,
    nllb_moe,
    switch,
    t5,
)

_MODULES = (
    *(composed, deepseek_v3, deepseek_v4, ernie, gemma, granite, hunyuan, kimi_linear),
    *(llama4, mimo_v2, mistral, nemotron_h, phi, qwen3, qwen3_next, windowed),
    *(m2m_100, marian, mbart, nllb_moe, switch, t5),
)
# In the order of the modules, and of the families in a module.
FAMILIES = {
    family.model_type: family
    for module in _MODULES
    for family in vars(module).values()
    if isinstance(family, Family)
}

# Keys of a config that an error message names.
_SHOWN = 12


def family_of(config: PublishedConfig) -> Family:
    """Returns the family of a config.

    Raises:
      UserError: the architecture is unknown. The message has the known ones, and keys of the config
        that no family reads. The name of a real model is often nearest to one of another kind.
    """
    name = config.get("model_type", kind=str)
    if name in FAMILIES:
        return FAMILIES[name]
    others = config.unknown(set().union(*(each.class_keys for each in FAMILIES.values())))
    lacks = f" No family reads its {', '.join(others[:_SHOWN])}." if others else ""
    raise UserError(
        f"{config.where}: the architecture {name!r} is unknown. The families are "
        f"{', '.join(sorted(FAMILIES))}.{lacks}"
    )


__all__ = ["FAMILIES", "Family", "family_of"]
