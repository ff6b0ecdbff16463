"""Rotary positions: queries and keys are rotated by angles proportional to their positions.

Su et al. 2021, arXiv 2104.09864, section 3.2. The product of a query and a key then depends on
their distance and not on their positions.
"""

from __future__ import annotations

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.sharding import annotate


def check(p: Params, head_dim: int, path: str) -> None:
    """Checks the rotary options of an attention.

    Args:
      p: Params of the attention.
      head_dim: size of D.
      path: path of the attention, for error messages.

    Raises:
      ValueError: the rotated fraction of D is not an even number of dimensions, or the base is too
        small.
    """
    if not p.rotary_fraction:
        return
    rotated = p.rotary_fraction * head_dim
    if rotated % 2 or rotated < 2:
        raise ValueError(
            f"{path}.rotary_fraction: {p.rotary_fraction} of {path}.head_dim {head_dim} is "
            f"{rotated:g} dimensions; an even number was expected"
        )


def positions_in_segments(segments_BL: tf.Tensor) -> tf.Tensor:
    """Returns the int32 position [B,L] of each token within its segment.

    Args:
      segments_BL: int32 segments; the tokens of a segment are contiguous.
    """
    segments_BL = _annotate_unsplit(segments_BL)
    length = segments_BL.shape[1]
    is_first_BL = tf.not_equal(segments_BL[:, 1:], segments_BL[:, :-1])
    is_first_BL = tf.pad(is_first_BL, [[0, 0], [1, 0]], constant_values=True)
    start_BL = _annotate_unsplit(tf.where(is_first_BL, tf.range(length)[None], 0))
    # A running maximum in log2(L) steps: after each, it covers twice as many tokens.
    covered = 1
    while covered < length:
        earlier_BL = tf.pad(start_BL[:, :-covered], [[0, 0], [covered, 0]])
        start_BL = _annotate_unsplit(tf.maximum(start_BL, earlier_BL))
        covered *= 2
    return annotate(tf.range(length)[None] - start_BL, "BL", reserved="N")


def _annotate_unsplit(x_BL: tf.Tensor) -> tf.Tensor:
    """Keeps L unsplit; otherwise every step of the running maximum would need communication."""
    return annotate(x_BL, "BL", unsplit="L")


def rotate(x_BLND: tf.Tensor, positions_BL: tf.Tensor, fraction: float, base: float) -> tf.Tensor:
    """Returns x [B,L,N,D] with the first `fraction` of D rotated.

    With r rotated dimensions, dimensions i and r/2 + i are a pair, rotated by the angle
    position * base^(-2i/r). Angles, sines and cosines are computed in float32.

    Args:
      x_BLND: queries or keys.
      positions_BL: int positions, [B,L] or [1,L].
      fraction: share of D that is rotated.
      base: base of the wavelengths.
    """
    rotated = round(fraction * x_BLND.shape[-1])
    exponents = tf.range(rotated // 2, dtype=tf.float32) * (2.0 / rotated)
    timescales = tf.pow(tf.constant(base, tf.float32), exponents)
    angles = tf.cast(positions_BL, tf.float32)[:, :, None, None] / timescales
    sine, cosine = tf.cast(tf.sin(angles), x_BLND.dtype), tf.cast(tf.cos(angles), x_BLND.dtype)
    half = rotated // 2
    first, second, rest = tf.split(x_BLND, [half, half, x_BLND.shape[-1] - rotated], axis=-1)
    return tf.concat(
        [first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1
    )
