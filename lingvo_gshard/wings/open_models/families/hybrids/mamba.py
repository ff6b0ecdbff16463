"""The keys of Mamba-2, which have other names in each family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.family import pattern_of
from lingvo_gshard.wings.published_layers.mamba import Mamba2

_HAS_BIAS = "use_convolution_bias"


def read_mamba(config: PublishedConfig, keys: Mapping[str, str], epsilon: str) -> Params:
    """Returns the Params of Mamba-2.

    Args:
      keys: hyperparameter -> key. The key of num_heads counts the heads of all groups.
      epsilon: the key that has the epsilon of its norm.

    Raises:
      UserError: groups have no equal numbers of heads.
    """
    values = {name: config.get(key) for name, key in keys.items() if name != _HAS_BIAS}
    heads, groups = values["num_heads"], values["num_groups"]
    if heads % groups:
        raise UserError(
            f"{config.where}: {keys['num_heads']} is {heads}; a multiple of {keys['num_groups']}="
            f"{groups} was expected"
        )
    values[_HAS_BIAS] = config.get(keys[_HAS_BIAS], False)
    mamba = Mamba2.params().set(**values)
    return mamba.set(num_heads=heads // groups, epsilon=config.get(epsilon, kind=float))


def mamba_config(mamba: Params, keys: Mapping[str, str]) -> dict[str, Any]:
    """Returns the keys that `read_mamba` reads, with their values for the Params of Mamba-2."""
    found = {key: mamba.get(name) for name, key in keys.items()}
    return found | {keys["num_heads"]: mamba.num_groups * mamba.num_heads}


def first_mamba(decoder: Params) -> Params | None:
    """Returns the Params of Mamba-2 in the layers of a decoder; None if there is none."""
    return next((each for each in pattern_of(decoder) if each.cls is Mamba2), None)
