"""Rotary positions: the product of a query and a key depends on their distance alone.

Su et al. 2021, arXiv 2104.09864, section 3.2. A rotation turns a pair of dimensions by
position / timescale. A scaling (`RotaryScaling`) changes the timescales for texts longer than those
that a model was trained on.
"""

from __future__ import annotations

from typing import NamedTuple

from lingvo_gshard.core import Configurable, Params, UserError, tf
from lingvo_gshard.sharding import annotate


class RotaryScaling(Configurable):
    """The timescales base^(2i/r) of Su et al. 2021, arXiv 2104.09864, section 3.2.2.

    A subclass is one scaling.

    Attributes:
      needs_lengths: whether the timescales depend on the length of the text.
    """

    needs_lengths = False

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params)
        self.path = path

    def timescales(
        self, rotated: int, base: float, length_BL: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns float32 timescales of the r/2 pairs: [r/2], or [B,L,1,r/2] if lengths matter.

        Args:
          rotated: number r of rotated dimensions.
          length_BL: int32, number of tokens of each token's text; only with `needs_lengths`.
        """
        del length_BL
        return tf.pow(tf.constant(base, tf.float32), self.exponents(rotated))

    def exponents(self, rotated: int) -> tf.Tensor:
        """Returns the float32 exponents 2i/r [r/2] of the base."""
        return tf.range(rotated // 2, dtype=tf.float32) * (2.0 / rotated)

    def magnitude(self, length_BL: tf.Tensor | None = None) -> float | tf.Tensor:
        """Returns the factor of the rotated queries, and of the rotated keys.

        Args:
          length_BL: as in `timescales`. With `needs_lengths`, the factor may be [B,L,1,1].
        """
        del length_BL
        return 1.0


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
        "rotary_fraction", 0.0, "Fraction of D rotated by position; 0: none.", minimum=0, maximum=1
    )
    define_rotation(p)


def define_rotation(p: Params) -> None:
    """Adds the options of the rotation itself."""
    p.define("rotary_base", 10000.0, "Base of the wavelengths of the rotations.", above=1)
    p.define(
        "rotary_scaling",
        RotaryScaling.params(),
        "Params of a scaling for longer texts, such as a class of "
        "wings/published_layers/rotary_scaling.py.",
    )


def check(p: Params, head_dim: int, path: str) -> None:
    """Checks the rotary options of an attention.

    Raises:
      UserError: the rotated fraction of D is not an even number of dimensions.
    """
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
    scaling: RotaryScaling | None = None,
) -> tf.Tensor:
    """Returns x [B,L,N,D] with the first `fraction` of D rotated.

    Of r rotated dimensions, i and r/2 + i are a pair. It is rotated by the angle
    position * base^(-2i/r), if there is no scaling. Angles, sines and cosines are computed in
    float32.

    Args:
      x_BLND: queries or keys.
      fraction: share of D that is rotated.
      base: base of the wavelengths.
      scaling: changes wavelengths and lengths; None for none.
    """
    rotated = round(fraction * x_BLND.shape[-1])
    half, rest_size = rotated // 2, x_BLND.shape[-1] - rotated
    scaling = scaling or RotaryScaling(RotaryScaling.params())
    sine, cosine = sine_and_cosine(x_BLND.dtype, rotated, base, positions, scaling)
    first, second, rest = tf.split(x_BLND, [half, half, rest_size], axis=-1)
    return tf.concat([*turn(first, second, sine, cosine), rest], axis=-1)


def sine_and_cosine(
    dtype: tf.DType, rotated: int, base: float, positions: TextPositions, scaling: RotaryScaling
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns sine and cosine of all angles, times the scaling's magnitude, [B,L,1,r/2].

    Args:
      rotated: number r of rotated dimensions.
    """
    timescales = scaling.timescales(rotated, base, positions.length_BL)
    angles = tf.cast(positions.index_BL, tf.float32)[:, :, None, None] / timescales
    sine, cosine = tf.sin(angles), tf.cos(angles)
    magnitude = scaling.magnitude(positions.length_BL)
    # Most scalings have no magnitude, and then nothing is multiplied.
    if tf.is_tensor(magnitude) or magnitude != 1.0:
        sine, cosine = sine * magnitude, cosine * magnitude
    return tf.cast(sine, dtype), tf.cast(cosine, dtype)


def turn(
    first: tf.Tensor, second: tf.Tensor, sine: tf.Tensor, cosine: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns both dimensions of each pair, rotated."""
    return first * cosine - second * sine, second * cosine + first * sine
