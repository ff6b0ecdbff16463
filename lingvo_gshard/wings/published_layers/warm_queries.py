"""Queries that grow with their positions, so that attention in long texts stays sharp."""

from __future__ import annotations

from lingvo_gshard.core import Params
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers import rotary


def define(p: Params) -> None:
    """Adds the options to the Params of an attention."""
    p.define(
        "temperature_floor",
        0,
        "Positions n after which queries grow: times 1 + temperature_scale * "
        "log(1 + floor((position + temperature_offset) / n)) (arXiv 2501.19399); 0: never.",
        minimum=0,
    )
    p.define("temperature_offset", 1, "See temperature_floor.", minimum=0)
    p.define("temperature_scale", 0.1, "See temperature_floor.", minimum=0)


def warm(query_BLND: tf.Tensor, positions: rotary.TextPositions | None, p: Params) -> tf.Tensor:
    """Returns the queries, larger at later positions if Params say so."""
    if not p.temperature_floor:
        return query_BLND
    assert positions is not None
    count_BL = (positions.index_BL + p.temperature_offset) // p.temperature_floor
    factor_BL = 1.0 + p.temperature_scale * tf.math.log1p(tf.cast(count_BL, tf.float32))
    warmed_BLND = tf.cast(query_BLND, tf.float32) * factor_BL[:, :, None, None]
    return tf.cast(warmed_BLND, query_BLND.dtype)
