"""Rotary positions: queries and keys are rotated by angles proportional to their positions.

Su et al. 2021, arXiv 2104.09864, section 3.2. The product of a query and a key then depends on
their distance and not on their positions.
"""

from __future__ import annotations

from typing import NamedTuple

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers.attention.positions.rotary_scaling import RotaryScaling
from lingvo_gshard.sharding import annotate

# The dimensions that are a pair: i and r/2 + i, or 2i and 2i + 1.
HALVES, NEIGHBORS = "halves", "neighbors"


class TextPositions(NamedTuple):
    """Places of tokens in their texts.

    Attributes:
      index_BL: int32 position of each token, [B,L] or [1,L].
      length_BL: int32 number of tokens of its text, [B,L], [B,1] or [1,1]; None if no scaling needs
        it.
    """

    index_BL: tf.Tensor
    length_BL: tf.Tensor | None = None


def define(p: Params) -> None:
    """Adds the options of rotary positions to the Params of an attention."""
    p.define(
        "rotary_fraction",
        0.0,
        "Fraction of D rotated by position; 0 disables it.",
        minimum=0,
        maximum=1,
    )
    define_rotation(p)


def define_rotation(p: Params) -> None:
    """Adds the options of the rotation itself."""
    p.define("rotary_base", 10000.0, "Base of the wavelengths of the rotations.", above=1)
    p.define(
        "rotary_pairs",
        HALVES,
        "Which of r rotated dimensions are a pair: 'halves', i and r/2 + i, or 'neighbors', 2i and "
        "2i + 1.",
    )
    p.define(
        "rotary_scaling",
        RotaryScaling.params(),
        "Params of a scaling for longer texts: a class of attention/positions/rotary_scaling.py.",
    )


def check_pairs(p: Params, path: str) -> None:
    """Raises ValueError if `rotary_pairs` is unknown."""
    if p.rotary_pairs not in (HALVES, NEIGHBORS):
        nearest = names.nearest(p.rotary_pairs, [HALVES, NEIGHBORS])
        raise UserError(f"{path}.rotary_pairs: {p.rotary_pairs!r}. {nearest}")


def check(p: Params, head_dim: int, path: str) -> None:
    """Checks the rotary options of an attention.

    Args:
      p: Params of the attention.
      head_dim: size of D.
      path: path of the attention, for error messages.

    Raises:
      UserError: the rotated fraction of D is not an even number of dimensions, or the pairs are
        unknown.
    """
    check_pairs(p, path)
    if not p.rotary_fraction:
        return
    rotated = p.rotary_fraction * head_dim
    if rotated % 2 or rotated < 2:
        raise UserError(
            f"{path}.rotary_fraction: {p.rotary_fraction} of {path}.head_dim {head_dim} is "
            f"{rotated:g} dimensions; an even number was expected"
        )


def positions_in_segments(segments_BL: tf.Tensor) -> tf.Tensor:
    """Returns the int32 position [B,L] of each token within its segment.

    Args:
      segments_BL: int32 segments; the tokens of a segment are contiguous.
    """
    length = segments_BL.shape[1]
    is_first_BL = _is_first_in_segment(segments_BL)
    start_BL = _annotate_unsplit(tf.where(is_first_BL, tf.range(length)[None], 0))
    # A running maximum in log2(L) steps: after each, it covers twice as many tokens.
    covered = 1
    while covered < length:
        earlier_BL = tf.pad(start_BL[:, :-covered], [[0, 0], [covered, 0]])
        start_BL = _annotate_unsplit(tf.maximum(start_BL, earlier_BL))
        covered *= 2
    return annotate(tf.range(length)[None] - start_BL, "BL", reserved="N")


def is_first_in_segment(segments_BL: tf.Tensor) -> tf.Tensor:
    """Returns whether each token is the first of its segment, bool [B,L].

    Args:
      segments_BL: int32 segments; the tokens of a segment are contiguous.
    """
    return annotate(_is_first_in_segment(segments_BL), "BL")


def _is_first_in_segment(segments_BL: tf.Tensor) -> tf.Tensor:
    segments_BL = _annotate_unsplit(segments_BL)
    is_first_BL = tf.not_equal(segments_BL[:, 1:], segments_BL[:, :-1])
    return tf.pad(is_first_BL, [[0, 0], [1, 0]], constant_values=True)


def _annotate_unsplit(x_BL: tf.Tensor) -> tf.Tensor:
    """Keeps L unsplit; otherwise every step of the running maximum would need communication."""
    return annotate(x_BL, "BL", unsplit="L")


def positions_of_rows(
    segments_BL: tf.Tensor | None, length: int, scaling: RotaryScaling
) -> TextPositions:
    """Returns the positions of tokens in packed rows.

    Args:
      segments_BL: int32 segments; None if each row is one segment.
      length: size of L.
      scaling: the scaling that will read the positions.
    """
    if segments_BL is None:
        index_1L = tf.range(length)[None]
        return TextPositions(index_1L, tf.constant([[length]]) if scaling.needs_lengths else None)
    index_BL = positions_in_segments(segments_BL)
    if not scaling.needs_lengths:
        return TextPositions(index_BL)
    after_BL = tf.reverse(positions_in_segments(tf.reverse(segments_BL, [1])), [1])
    return TextPositions(index_BL, index_BL + after_BL + 1)


def positions_so_far(index_BL: tf.Tensor, scaling: RotaryScaling) -> TextPositions:
    """Returns the positions of new tokens, whose texts end with the last of them.

    Args:
      index_BL: int32 position of each new token.
      scaling: the scaling that will read the positions.
    """
    if not scaling.needs_lengths:
        return TextPositions(index_BL)
    return TextPositions(index_BL, tf.reduce_max(index_BL, 1, keepdims=True) + 1)


def rotate(
    x_BLND: tf.Tensor,
    positions: TextPositions,
    fraction: float,
    base: float,
    pairs: str = HALVES,
    scaling: RotaryScaling | None = None,
) -> tf.Tensor:
    """Returns x [B,L,N,D] with the first `fraction` of D rotated.

    The i-th pair of r rotated dimensions is rotated by the angle position * base^(-2i/r), if there
    is no scaling. Angles, sines and cosines are computed in float32.

    Args:
      x_BLND: queries or keys.
      positions: positions of the tokens.
      fraction: share of D that is rotated.
      base: base of the wavelengths.
      pairs: which dimensions are a pair, HALVES or NEIGHBORS.
      scaling: changes wavelengths and lengths; None for none.
    """
    rotated = round(fraction * x_BLND.shape[-1])
    scaling = scaling or RotaryScaling(RotaryScaling.params())
    timescales = scaling.timescales(rotated, base, positions.length_BL)
    angles = tf.cast(positions.index_BL, tf.float32)[:, :, None, None] / timescales
    sine, cosine = tf.sin(angles), tf.cos(angles)
    if scaling.magnitude != 1.0:
        sine, cosine = sine * scaling.magnitude, cosine * scaling.magnitude
    sine, cosine = tf.cast(sine, x_BLND.dtype), tf.cast(cosine, x_BLND.dtype)
    half = rotated // 2
    if pairs == NEIGHBORS:
        turned, rest = tf.split(x_BLND, [rotated, x_BLND.shape[-1] - rotated], axis=-1)
        first, second = tf.unstack(tf.reshape(turned, [*x_BLND.shape[:-1], half, 2]), axis=-1)
        both = tf.stack(_turn(first, second, sine, cosine), axis=-1)
        return tf.concat([tf.reshape(both, turned.shape), rest], axis=-1)
    first, second, rest = tf.split(x_BLND, [half, half, x_BLND.shape[-1] - rotated], axis=-1)
    return tf.concat([*_turn(first, second, sine, cosine), rest], axis=-1)


def _turn(
    first: tf.Tensor, second: tf.Tensor, sine: tf.Tensor, cosine: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    return first * cosine - second * sine, second * cosine + first * sine
