"""Family: what is particular to the models of one architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.table import Table


@dataclasses.dataclass(frozen=True)
class Family:
    """The models of one architecture.

    Attributes:
      model_type: the name of the architecture in `config.json`.
      architecture: the class of transformers that runs it.
      table: where published tensors go.
      task_of: returns the Params of the task that a config describes; ValueError if it asks for
        something that is not supported.
      config_of: returns the values of a `config.json` from the Params of a task. Another task may
        differ from what these describe, so callers compare.
      left_out: returns the beginnings of the names of tensors that are not imported.
    """

    model_type: str
    architecture: str
    table: Table
    task_of: Callable[[PublishedConfig], Params]
    config_of: Callable[[Params], dict[str, Any]]
    left_out: Callable[[PublishedConfig], tuple[str, ...]] = lambda config: ()


def extra_layers(config: PublishedConfig) -> tuple[str, ...]:
    """Returns the beginnings of the tensors of layers that predict further tokens.

    They stand after the model's own layers. No program needs them to generate.
    """
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers", 0)
    return tuple(f"model.layers.{first + index}." for index in range(count))
