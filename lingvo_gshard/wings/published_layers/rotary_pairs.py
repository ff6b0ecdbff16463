"""Rotary positions whose pairs are neighbors, as some published models have them."""

from __future__ import annotations

from lingvo_gshard.core import Params, tf
from lingvo_gshard.layers import RotaryScaling, rotary

# The dimensions that are a pair: i and r/2 + i, or 2i and 2i + 1.
HALVES, NEIGHBORS = "halves", "neighbors"


def define(p: Params) -> None:
    """Adds the option to the Params of an attention."""
    p.define(
        "rotary_pairs",
        HALVES,
        "Which of r rotated dimensions are a pair: 'halves', i and r/2 + i, or 'neighbors', 2i and "
        "2i + 1.",
        choices=(HALVES, NEIGHBORS),
    )


def rotate(
    x_BLND: tf.Tensor,
    positions: rotary.TextPositions,
    fraction: float,
    p: Params,
    scaling: RotaryScaling,
) -> tf.Tensor:
    """Returns x [B,L,N,D] with the first `fraction` of D rotated, as `rotary.rotate` does.

    Args:
      x_BLND: queries or keys.
      fraction: share of D that is rotated.
      p: Params with `rotary_base` and `rotary_pairs`.
      scaling: changes wavelengths and lengths.
    """
    if p.rotary_pairs == HALVES:
        return rotary.rotate(x_BLND, positions, fraction, p.rotary_base, scaling)
    rotated = round(fraction * x_BLND.shape[-1])
    sine, cosine = rotary.sine_and_cosine(x_BLND.dtype, rotated, p.rotary_base, positions, scaling)
    turned, rest = tf.split(x_BLND, [rotated, x_BLND.shape[-1] - rotated], axis=-1)
    pairs = tf.reshape(turned, [*x_BLND.shape[:-1], rotated // 2, 2])
    first, second = tf.unstack(pairs, axis=-1)
    both = tf.stack(rotary.turn(first, second, sine, cosine), axis=-1)
    return tf.concat([tf.reshape(both, turned.shape), rest], axis=-1)
