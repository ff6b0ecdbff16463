"""Layers that alternate: attentions with a sliding window, and attentions without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.open_models.config import PublishedConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(config: PublishedConfig, usual_period: int) -> list[str]:
    """Returns the type of each layer's attention.

    Args:
      config: the config.
      usual_period: used if the config has neither `layer_types` nor a period. The last layer of
        each such number of layers has full attention; the others have a sliding window.

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

    The layers that begin the first, incomplete period run one by one, so that the others divide.

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
