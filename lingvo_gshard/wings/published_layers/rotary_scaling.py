"""Scalings of rotary positions, for texts longer than those that a model was trained on.

`rotary_scaling` of an attention chooses one. YaRN and LongRoPE also change the length of the
rotated vectors.
"""

from __future__ import annotations

import math

import numpy as np

from lingvo_gshard.core import Params, UserError, tf
from lingvo_gshard.layers import RotaryScaling


class _FixedScaling(RotaryScaling):
    """A scaling whose timescales do not depend on the text."""

    def timescales(
        self, rotated: int, base: float, length_BL: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the timescales [r/2]; see the base class."""
        del length_BL
        return tf.constant(self._scaled(rotated, base), tf.float32)

    def _scaled(self, rotated: int, base: float) -> np.ndarray:
        """Returns the float64 timescales [r/2]."""
        raise NotImplementedError(f"{type(self).__name__} defines no _scaled")


class LinearScaling(_FixedScaling):
    """Divides positions by a factor. Chen et al. 2023, arXiv 2306.15595, section 2.3."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("factor", 1.0, "Positions are divided by this number.", above=0)
        return p

    def _scaled(self, rotated: int, base: float) -> np.ndarray:
        return _plain(rotated, base) * self.p.factor


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
        assert length_BL is not None
        longer_BL = tf.cast(tf.maximum(length_BL, p.original_length), tf.float32)
        growth_BL = p.factor * longer_BL / p.original_length - (p.factor - 1.0)
        bases_BL = base * tf.pow(growth_BL, _growth_exponent(self, rotated))
        return tf.pow(bases_BL[:, :, None, None], self.exponents(rotated))


class AlphaNTKScaling(_FixedScaling):
    """Multiplies the base by alpha^(r/(r-2)), whatever the length (Peng et al. 2023, 3.1).

    arXiv 2309.00071. Hunyuan's models are published with it (arXiv 2411.02265).
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("alpha", 1.0, "Factor of the wavelengths of the slowest pair.", above=0)
        return p

    def _scaled(self, rotated: int, base: float) -> np.ndarray:
        return _plain(rotated, base * self.p.alpha ** _growth_exponent(self, rotated))


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


class ProportionalScaling(LinearScaling):
    """Rotates only the fastest pairs of a head, by the timescales of a head that rotates whole."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("share", 1.0, "Share of the pairs that rotate.", minimum=0, maximum=1)
        return p

    def _scaled(self, rotated: int, base: float) -> np.ndarray:
        turning = np.arange(rotated // 2) < int(self.p.share * rotated // 2)
        return np.where(turning, super()._scaled(rotated, base), np.inf)


class Llama3Scaling(_FixedScaling):
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
            "high_frequency_factor", 4.0, "Wavelengths below original_length / this stay.", above=0
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

    def _scaled(self, rotated: int, base: float) -> np.ndarray:
        p, plain = self.p, _plain(rotated, base)
        rotations = p.original_length / (2 * math.pi * plain)
        width = p.high_frequency_factor - p.low_frequency_factor
        above = rotations - p.low_frequency_factor
        # Llama 4 has nothing between the two.
        kept = np.clip(above / width, 0, 1) if width else (above >= 0).astype(np.float64)
        return _interpolate(plain, p.factor, kept)


class YarnScaling(_FixedScaling):
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
        p.define("magnitude", 0.0, "Factor of rotated vectors; 0: 0.1 ln(factor) + 1.", minimum=0)
        p.define("truncate", True, "Whether bounds between pairs are rounded to whole pairs.")
        return p

    def magnitude(self, length_BL: tf.Tensor | None = None) -> float | tf.Tensor:
        del length_BL
        return self.p.magnitude or 0.1 * math.log(self.p.factor) + 1.0

    def _scaled(self, rotated: int, base: float) -> np.ndarray:
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
        return _interpolate(_plain(rotated, base), p.factor, 1 - divided)


def _define_original_length(p: Params, default: int = 4096) -> None:
    p.define("original_length", default, "Positions of a text in training.", minimum=1)


def _growth_exponent(scaling: RotaryScaling, rotated: int) -> float:
    """Returns r / (r - 2), the exponent of the growth of a base."""
    if rotated < 4:
        raise UserError(
            f"{scaling.path}: {type(scaling).__name__} with {rotated} rotated dimensions; 4 or "
            "more were expected"
        )
    return rotated / (rotated - 2)


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
