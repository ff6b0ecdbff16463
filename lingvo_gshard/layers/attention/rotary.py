"""Rotary positions: queries and keys turned by angles that grow with their positions.

Su et al. 2021, arXiv 2104.09864, section 3.2: what a query and a key make together then depends on
how far apart they stand, and not on where.
"""

import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.sharding import annotate


def check(p: Params, head_dim: int, path: str) -> None:
    """Raises ValueError naming the Params of an attention that can turn no such share of D."""
    if not 0 <= p.rotary_fraction <= 1:
        raise ValueError(f"{path}.rotary_fraction: {p.rotary_fraction} is not in [0, 1]")
    if not p.rotary_fraction:
        return
    turned = p.rotary_fraction * head_dim
    if turned % 2 or turned < 2:
        raise ValueError(
            f"{path}.rotary_fraction: {p.rotary_fraction} of {path}.head_dim {head_dim} is "
            f"{turned:g} dimensions; an even number was expected"
        )
    if p.rotary_base <= 1:
        raise ValueError(f"{path}.rotary_base: {p.rotary_base}; more than 1 was expected")


def positions_in_segments(segments_BL: tf.Tensor) -> tf.Tensor:
    """Returns int32 [B,L]: how many tokens of its own segment stand before each one.

    The tokens of a segment stand side by side.
    """
    segments_BL = _whole_rows(segments_BL)
    length = segments_BL.shape[1]
    is_first_BL = tf.not_equal(segments_BL[:, 1:], segments_BL[:, :-1])
    is_first_BL = tf.pad(is_first_BL, [[0, 0], [1, 0]], constant_values=True)
    start_BL = _whole_rows(tf.where(is_first_BL, tf.range(length)[None], 0))
    # The last start up to each token: of 1, 2, 4, ... tokens, and so of all.
    reach = 1
    while reach < length:
        before_BL = tf.pad(start_BL[:, :-reach], [[0, 0], [reach, 0]])
        start_BL = _whole_rows(tf.maximum(start_BL, before_BL))
        reach *= 2
    return annotate(tf.range(length)[None] - start_BL, "BL", reserved="N")


def _whole_rows(x_BL: tf.Tensor) -> tf.Tensor:
    """Annotated as not split by L: of parts, every step would ask the neighbors for theirs."""
    return annotate(x_BL, "BL", unsplit="L")


def rotate(x_BLND: tf.Tensor, positions_BL: tf.Tensor, fraction: float, base: float) -> tf.Tensor:
    """Returns [B,L,N,D]: the first `fraction` of D turned, in pairs, by positions * base^(-2i/D).

    Pair i is dimension i of the first and of the second half of those that are turned; D in the
    exponent counts the latter only. Angles, sines and cosines are float32.
    """
    turned = round(fraction * x_BLND.shape[-1])
    exponents = tf.range(turned // 2, dtype=tf.float32) * (2.0 / turned)
    timescales = tf.pow(tf.constant(base, tf.float32), exponents)
    angles = tf.cast(positions_BL, tf.float32)[:, :, None, None] / timescales
    sine, cosine = tf.cast(tf.sin(angles), x_BLND.dtype), tf.cast(tf.cos(angles), x_BLND.dtype)
    half = turned // 2
    first, second, rest = tf.split(x_BLND, [half, half, x_BLND.shape[-1] - turned], axis=-1)
    return tf.concat(
        [first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1
    )
