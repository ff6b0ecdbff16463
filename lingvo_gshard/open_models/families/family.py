"""Family: what is particular to the models of one architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_gshard.core import rounding
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.data.published_text_input import PublishedTextInput
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.table import Table

# Most positions of a row unless the user asks for another number.
USUAL_LENGTH = 1024


def text_input(length: int) -> Params:
    """Returns the input of a language model."""
    return PublishedTextInput.params().set(length=length, batch_rows=8)


def rotary_positions(config: PublishedConfig) -> tuple[int, bool]:
    """Returns `max_position_embeddings`, or what the scaling of rotary positions makes of them."""
    positions, rope = config.get("max_position_embeddings", USUAL_LENGTH), config.rope()
    # With this scaling, the number is that before it.
    is_before = rope.get("rope_type") == "dynamic"
    return (rounding.floor(positions * rope["factor"]) if is_before else positions), False


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
      input_of: returns the Params of the input, given the positions of a row.
      positions_of: returns the positions that the model was made for, and whether texts may have
        more.
      copies: names that a tensor may have besides its own -> its own, of which the first counts
        that the model has.
    """

    model_type: str
    architecture: str
    table: Table
    task_of: Callable[[PublishedConfig], Params]
    config_of: Callable[[Params], dict[str, Any]]
    left_out: Callable[[PublishedConfig], tuple[str, ...]] = lambda config: ()
    input_of: Callable[[int], Params] = text_input
    positions_of: Callable[[PublishedConfig], tuple[int, bool]] = rotary_positions
    copies: Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=lambda: {"lm_head.weight": ("model.embed_tokens.weight",)}
    )


def extra_layers(config: PublishedConfig) -> tuple[str, ...]:
    """Returns the beginnings of the tensors of layers that predict further tokens.

    They stand after the model's own layers. No program needs them to generate.
    """
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers", 0)
    return tuple(f"model.layers.{first + index}." for index in range(count))
