"""Family: what is particular to the models of one architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.published_inputs import PublishedTextInput
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
    return (random_numbers.floor(positions * rope["factor"]) if is_before else positions), False


@dataclasses.dataclass(frozen=True)
class Family:
    """The models of one architecture.

    Attributes:
      model_type: the name of the architecture in `config.json`.
      architecture: the class of transformers that runs it.
      table: the weight that each published tensor goes to.
      task_of: returns the Params of the task that a config describes; raises UserError if the
        config asks for something that is not supported.
      config_of: returns the values of a `config.json` for the Params of a task. `config.json` does
        not describe every task in full, so callers make the task of these values and compare.
      left_out: returns the beginnings of the names of tensors that are not imported.
      input_of: returns the Params of the input, given the positions of a row.
      positions_of: returns the positions that the model was made for, and whether texts may have
        more.
      copies: name of a tensor that may be a copy of a shared table -> names that this table may
        have. The first of these names that the model needs is the table.
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


SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(config: PublishedConfig, usual_period: int) -> list[str]:
    """Returns the type of each layer's attention.

    Args:
      config: the config.
      usual_period: number of layers of a period, if the config has neither `layer_types` nor a
        period. The last layer of a period has full attention, the other layers have a sliding
        window.

    Raises:
      UserError: `layer_types` has the wrong length.
    """
    layers = config.get("num_hidden_layers")
    period = config.get(
        "sliding_window_pattern", config.get("_sliding_window_pattern", usual_period)
    )
    usual = [FULL if (index + 1) % period == 0 else SLIDING for index in range(layers)]
    found = config.get("layer_types", usual)
    if len(found) != layers:
        raise UserError(f"{config.where}: layer_types has {len(found)} entries for {layers} layers")
    return found


def set_pattern(
    config: PublishedConfig, decoder: Params, kinds: Sequence[str], attentions: Mapping[str, Params]
) -> None:
    """Sets the attentions of a decoder's layers.

    If the layers do not divide into whole periods, the first layers run one by one, so that the
    remaining layers divide.

    Args:
      config: the config, for messages.
      decoder: Params of the stack.
      kinds: the type of each layer.
      attentions: type -> Params of the self-attention.

    Raises:
      UserError: a type is unknown.
    """
    for kind in kinds:
        if kind not in attentions:
            raise UserError(
                f"{config.where}: the layer type {kind!r} is unknown. "
                f"{names.nearest(kind, attentions)}"
            )
    count = len(kinds)
    period = next(n for n in range(1, count + 1) if list(kinds[n:]) == list(kinds[: count - n]))
    if period > 1:
        decoder.attention_pattern = tuple(attentions[kind].copy() for kind in kinds[:period])
        decoder.sequential_first = count % period if period < count else 0
    else:
        decoder.layer.self_attention = attentions[kinds[0]].copy()


def pattern_config(decoder: Params) -> list[str]:
    """Returns `layer_types` from the Params of a stack."""
    pattern = decoder.attention_pattern or (decoder.layer.self_attention,)
    windows = [pattern[index % len(pattern)].window for index in range(decoder.num_layers)]
    return [SLIDING if window else FULL for window in windows]
