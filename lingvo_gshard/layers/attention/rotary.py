"""Scalings of rotary positions, for texts longer than those that a model was trained on.

A rotation turns a pair of dimensions by position / timescale. A scaling changes the timescales, and
YaRN also the length of the rotated vectors. `rotary_scaling` of `SelfAttention` chooses one.

Su et al. 2021, arXiv 2104.09864, section 3.2. The product of a query and a key then depends on
their distance and not on their positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.shapes import known_sizes
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
          base: base of the timescales.
          length_BL: int32, number of tokens of each token's text; only with `needs_lengths`.
        """
        del length_BL
        return tf.pow(tf.constant(base, tf.float32), _exponents(rotated))

    def magnitude(self, length_BL: tf.Tensor | None = None) -> float | tf.Tensor:
        """Returns the factor of the rotated queries, and of the rotated keys.

        Args:
          length_BL: as in `timescales`. With `needs_lengths`, the factor may be [B,L,1,1].
        """
        del length_BL
        return 1.0


class LinearScaling(RotaryScaling):
    """Divides positions by a factor. Chen et al. 2023, arXiv 2306.15595, section 2.3."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("factor", 1.0, "Positions are divided by this number.", above=0)
        return p

    def timescales(
        self, rotated: int, base: float, length_BL: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the timescales [r/2]; see the base class."""
        del length_BL
        return tf.constant(_plain(rotated, base) * self.p.factor, tf.float32)


class DynamicNTKScaling(RotaryScaling):
    """Increases the base with the length of the text (Peng et al. 2023, arXiv 2309.00071, 3.3).

    The base is multiplied by (factor * length / original_length - factor + 1)^(r/(r-2)) for texts
    longer than `original_length`. In training and evaluation, a token's length is the length of its
    whole segment. In decoding, the length is the length of the text so far. Keys in the cache keep
    their first rotation, as in Hugging Face's transformers.
    """

    needs_lengths = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("factor", 1.0, "How fast the base grows with the length.", minimum=1)
        _define_original_length(p)
        return p

    def timescales(
        self, rotated: int, base: float, length_BL: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the timescales [B,L,1,r/2]; see the base class."""
        p = self.p
        if rotated < 4:
            raise UserError(
                f"{self.path}: DynamicNTKScaling with {rotated} rotated dimensions; 4 or more were "
                "expected"
            )
        assert length_BL is not None
        longer_BL = tf.cast(tf.maximum(length_BL, p.original_length), tf.float32)
        growth_BL = p.factor * longer_BL / p.original_length - (p.factor - 1.0)
        bases_BL = base * tf.pow(growth_BL, rotated / (rotated - 2))
        return tf.pow(bases_BL[:, :, None, None], _exponents(rotated))


class AlphaNTKScaling(RotaryScaling):
    """Multiplies the base by alpha^(r/(r-2)), whatever the length (Peng et al. 2023, 3.1).

    arXiv 2309.00071. Hunyuan's models are published with it (arXiv 2411.02265).
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("alpha", 1.0, "Factor of the wavelengths of the slowest pair.", above=0)
        return p

    def timescales(
        self, rotated: int, base: float, length_BL: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the timescales [r/2]; see the base class."""
        del length_BL
        if rotated < 4:
            raise UserError(
                f"{self.path}: AlphaNTKScaling with {rotated} rotated dimensions; 4 or more were "
                "expected"
            )
        base *= self.p.alpha ** (rotated / (rotated - 2))
        return tf.constant(_plain(rotated, base), tf.float32)


class LongRopeScaling(RotaryScaling):
    """Multiplies the timescale of each pair by a factor of its own. Ding et al. 2024, LongRoPE.

    arXiv 2402.13753. Texts longer than `original_length` have other factors than shorter ones. In
    training and evaluation, the whole segment counts. In decoding, the text so far counts, and keys
    in the cache keep their first rotation.
    """

    needs_lengths = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("short_factors", (), "Factors of the r/2 pairs in texts up to original_length.")
        p.define("long_factors", (), "Factors of the r/2 pairs in longer texts.")
        _define_original_length(p)
        p.define("short_magnitude", 1.0, "Factor of rotated queries and keys, of these.", above=0)
        p.define("long_magnitude", 1.0, "The same in longer texts.", above=0)
        return p

    def timescales(
        self, rotated: int, base: float, length_BL: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the timescales [B,L,1,r/2]; see the base class."""
        p, plain = self.p, _plain(rotated, base)
        for name in ("short_factors", "long_factors"):
            if len(p.get(name)) != rotated // 2:
                raise UserError(
                    f"{self.path}.{name}: {len(p.get(name))} factors for {rotated} rotated "
                    f"dimensions; {rotated // 2} were expected"
                )
        short, long = (
            tf.constant(plain * np.array(factors), tf.float32)
            for factors in (p.short_factors, p.long_factors)
        )
        return tf.where(self._is_long(length_BL), long, short)

    def magnitude(self, length_BL: tf.Tensor | None = None) -> float | tf.Tensor:
        """Returns the factor of the rotated queries and keys; see the base class."""
        p = self.p
        if p.short_magnitude == p.long_magnitude:
            return p.short_magnitude
        return tf.where(self._is_long(length_BL), p.long_magnitude, p.short_magnitude)

    def _is_long(self, length_BL: tf.Tensor | None) -> tf.Tensor:
        """Returns bool [B,L,1,1]: whether each token's text is longer than in training."""
        assert length_BL is not None
        return (length_BL > self.p.original_length)[:, :, None, None]


class Llama3Scaling(RotaryScaling):
    """Divides the frequencies of long wavelengths by a factor, and of medium wavelengths by less.

    Grattafiori et al. 2024, arXiv 2407.21783. The formula is from the code published with Llama 3.1
    (https://github.com/meta-llama/llama-models, `apply_scaling`).
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("factor", 8.0, "Divisor of the low frequencies.", minimum=1)
        p.define(
            "low_frequency_factor",
            1.0,
            "Wavelengths above original_length / this are divided by the factor.",
            above=0,
        )
        p.define(
            "high_frequency_factor",
            4.0,
            "Wavelengths below original_length / this stay as they are.",
            above=0,
        )
        _define_original_length(p, 8192)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        low, high = self.p.low_frequency_factor, self.p.high_frequency_factor
        if high < low:
            raise UserError(
                f"{path}.high_frequency_factor: {high}; {path}.low_frequency_factor, {low}, or "
                "more was expected"
            )

    def timescales(
        self, rotated: int, base: float, length_BL: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the timescales [r/2]; see the base class."""
        del length_BL
        p, plain = self.p, _plain(rotated, base)
        rotations = p.original_length / (2 * math.pi * plain)
        width = p.high_frequency_factor - p.low_frequency_factor
        above = rotations - p.low_frequency_factor
        # Llama 4 has nothing between the two.
        kept = np.clip(above / width, 0, 1) if width else (above >= 0).astype(np.float64)
        return tf.constant(_interpolate(plain, p.factor, kept), tf.float32)


class YarnScaling(RotaryScaling):
    """YaRN (Peng et al. 2023, arXiv 2309.00071, sections 3.2 and 3.4).

    Pairs that turn often in `original_length` positions keep their frequency. The frequency of
    pairs that turn seldom is divided by `factor`. The pairs between get a mean of both frequencies.
    Rotated vectors are multiplied by `magnitude`, which makes the softmax steeper.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("factor", 1.0, "Divisor of the low frequencies.", minimum=1)
        _define_original_length(p)
        p.define("beta_fast", 32.0, "The fewest turns of a frequency that is kept.", above=0)
        p.define("beta_slow", 1.0, "Turns up to which a frequency is divided.", above=0)
        p.define(
            "magnitude",
            0.0,
            "Factor of rotated queries and keys; 0: 0.1 ln(factor) + 1.",
            minimum=0,
        )
        p.define(
            "truncate", True, "Whether the bounds between the pairs are rounded to whole pairs."
        )
        return p

    def magnitude(self, length_BL: tf.Tensor | None = None) -> float | tf.Tensor:
        """Returns the factor of the rotated queries, and of the rotated keys."""
        del length_BL
        return self.p.magnitude or 0.1 * math.log(self.p.factor) + 1.0

    def timescales(
        self, rotated: int, base: float, length_BL: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the timescales [r/2]; see the base class."""
        del length_BL
        p = self.p
        first, last = (
            rotated * math.log(p.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (p.beta_fast, p.beta_slow)
        )
        if p.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotated - 1)
        # As in the published code, the ramp never has length 0.
        length = last - first if last != first else 0.001
        divided = np.clip((np.arange(rotated // 2) - first) / length, 0, 1)
        plain = _plain(rotated, base)
        return tf.constant(_interpolate(plain, p.factor, 1 - divided), tf.float32)


def _define_original_length(p: Params, default: int = 4096) -> None:
    p.define("original_length", default, "Positions of a text in training.", minimum=1)


def _exponents(rotated: int) -> tf.Tensor:
    return tf.range(rotated // 2, dtype=tf.float32) * (2.0 / rotated)


def _plain(rotated: int, base: float) -> np.ndarray:
    """Returns the float64 timescales [r/2] without scaling."""
    return base ** (np.arange(rotated // 2) * 2.0 / rotated)


def _interpolate(timescales: np.ndarray, factor: float, kept: np.ndarray) -> np.ndarray:
    """Returns timescales whose frequencies are means of the original and the divided ones.

    Args:
      timescales: float64 [r/2].
      factor: divisor of the frequencies.
      kept: float64 [r/2], weight of the original frequency, 0 to 1.
    """
    return timescales / (kept + (1 - kept) / factor)


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
        "Params of a scaling for longer texts: a class of attention/rotary.py.",
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


def chunks_of(segments_BL: tf.Tensor, chunk: int) -> tf.Tensor:
    """Returns int32 segments [B,L] that are the chunks of texts, 0 in padding.

    Args:
      segments_BL: int32 segments, each a text; the tokens of a segment are contiguous.
      chunk: positions of a chunk. The last one of a text may have fewer.
    """
    most = -(-known_sizes(segments_BL.shape)[1] // chunk)
    chunks_BL = segments_BL * most + positions_in_segments(segments_BL) // chunk
    return annotate(tf.where(tf.equal(segments_BL, 0), 0, chunks_BL), "BL")


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
    half, rest_size = rotated // 2, x_BLND.shape[-1] - rotated
    scaling = scaling or RotaryScaling(RotaryScaling.params())
    sine, cosine = _sine_and_cosine(rotated, base, positions, scaling)
    sine, cosine = tf.cast(sine, x_BLND.dtype), tf.cast(cosine, x_BLND.dtype)
    if pairs == NEIGHBORS:
        turned, rest = tf.split(x_BLND, [rotated, rest_size], axis=-1)
        first, second = tf.unstack(tf.reshape(turned, [*x_BLND.shape[:-1], half, 2]), axis=-1)
        both = tf.stack(_turn(first, second, sine, cosine), axis=-1)
        return tf.concat([tf.reshape(both, turned.shape), rest], axis=-1)
    first, second, rest = tf.split(x_BLND, [half, half, rest_size], axis=-1)
    return tf.concat([*_turn(first, second, sine, cosine), rest], axis=-1)


def _sine_and_cosine(
    rotated: int, base: float, positions: TextPositions, scaling: RotaryScaling
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns sine and cosine of all angles, times the scaling's magnitude, float32 [B,L,1,r/2]."""
    timescales = scaling.timescales(rotated, base, positions.length_BL)
    angles = tf.cast(positions.index_BL, tf.float32)[:, :, None, None] / timescales
    sine, cosine = tf.sin(angles), tf.cos(angles)
    magnitude = scaling.magnitude(positions.length_BL)
    # Most scalings have no magnitude, and then nothing is multiplied.
    is_one = not tf.is_tensor(magnitude) and magnitude == 1.0
    return (sine, cosine) if is_one else (sine * magnitude, cosine * magnitude)


def _turn(
    first: tf.Tensor, second: tf.Tensor, sine: tf.Tensor, cosine: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    return first * cosine - second * sine, second * cosine + first * sine
