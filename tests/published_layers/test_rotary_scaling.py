# tests: layers/attention/rotary.py, wings/published_layers/rotary_scaling.py
"""Compares scalings of rotary positions with numbers of Hugging Face's transformers 5.23."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.attention import rotary
from lingvo_gshard.layers.attention.rotary import RotaryScaling
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention
from lingvo_gshard.wings.published_layers.rotary_scaling import (
    AlphaNTKScaling,
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)

# Frequencies of some pairs: Llama 3.1, DeepSeek-V3, gpt-oss, Gemma 3's factor, a dynamic scaling,
# Gemma 4.
PUBLISHED = {
    "llama3": (
        Llama3Scaling.params().set(factor=8.0, original_length=8192),
        (128, 500000.0),
        {0: 1.0, 16: 0.03760603, 32: 0.000524846, 40: 3.428102e-05, 63: 3.068926e-07},
    ),
    "yarn": (
        YarnScaling.params().set(factor=40.0, original_length=4096, magnitude=1.0),
        (64, 10000.0),
        {0: 1.0, 10: 0.05623413, 16: 0.0055, 20: 0.0007905694, 24: 2.5e-05, 31: 3.333804e-06},
    ),
    "yarn with a fraction of a pair": (
        YarnScaling.params().set(factor=32.0, original_length=4096, truncate=False),
        (64, 150000.0),
        {0: 1.0, 8: 0.05081327, 10: 0.019335, 16: 0.0004564839, 24: 4.099978e-06},
    ),
    "linear": (
        LinearScaling.params().set(factor=8.0),
        (16, 1000000.0),
        {0: 0.125, 1: 0.02222849, 4: 0.000125, 7: 7.029267e-07},
    ),
    "dynamic": (
        DynamicNTKScaling.params().set(factor=4.0, original_length=2048),
        (16, 10000.0),
        {0: 1.0, 1: 0.2721563, 4: 0.005486226, 7: 0.0001105933},
    ),
    "proportional": (
        ProportionalScaling.params().set(share=0.25),
        (512, 1000000.0),
        {0: 1.0, 1: 0.9474635, 32: 0.1778279, 63: 0.0333762, 64: 0.0, 255: 0.0},
    ),
}


class RotaryScalingTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(*PUBLISHED)
    def test_frequencies_are_those_of_transformers(self, name):
        params, (rotated, base), published = PUBLISHED[name]
        scaling = params.instantiate(path="scaling")
        lengths = tf.constant([[3000]]) if scaling.needs_lengths else None
        found = 1.0 / np.ravel(scaling.timescales(rotated, base, lengths))
        self.assertEqual(found.shape, (rotated // 2,))
        pairs = list(published)
        self.assertAllClose(found[pairs], [published[i] for i in pairs], rtol=2e-5, atol=0)

    def test_the_magnitude_of_yarn(self):
        default = YarnScaling.params().set(factor=32.0).instantiate()
        self.assertAllClose(default.magnitude(), 1.3465735902799727, rtol=1e-6, atol=1e-12)
        self.assertEqual(YarnScaling.params().set(magnitude=0.7).instantiate().magnitude(), 0.7)
        self.assertEqual(LinearScaling.params().set(factor=3.0).instantiate().magnitude(), 1.0)
        x = tf.constant(np.random.default_rng(0).normal(size=(1, 1, 2, 8)), tf.float32)
        turned = rotary.rotate(
            x, rotary.TextPositions(tf.constant([[5]])), 0.5, 10000.0, scaling=default
        )
        ratio = np.linalg.norm(turned[..., :4], axis=-1) / np.linalg.norm(x[..., :4], axis=-1)
        assert_close(ratio, np.full(ratio.shape, default.magnitude()), "order")
        self.assertAllEqual(turned[..., 4:], x[..., 4:])

    def test_a_dynamic_scaling_knows_the_length_of_each_text(self):
        segments = tf.constant([[1, 1, 1, 2, 2, 0], [3, 3, 3, 3, 3, 3]])
        scaling = DynamicNTKScaling.params().set(factor=2.0, original_length=4).instantiate()
        positions = rotary.positions_of_rows(segments, 6, scaling)
        self.assertAllEqual(positions.index_BL, [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
        self.assertAllEqual(positions.length_BL, [[3, 3, 3, 2, 2, 1], [6] * 6])
        plain = RotaryScaling.params().instantiate().timescales(8, 100.0)
        found = scaling.timescales(8, 100.0, positions.length_BL)[:, :, 0]
        assert_close(found[0, 0], plain, "float32")
        longer = 100.0 * (2 * 6 / 4 - 1) ** (8 / 6)
        assert_close(found[1, 0], longer ** (np.arange(4) / 4), "float32")
        so_far = rotary.positions_so_far(tf.constant([[3, 4], [0, 1]]), scaling)
        self.assertAllEqual(so_far.length_BL, [[5], [2]])

    def test_longrope_has_factors_for_each_length_of_text(self):
        short, long = (1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0)
        scaling = LongRopeScaling.params().set(
            short_factors=short,
            long_factors=long,
            original_length=4,
            short_magnitude=1.1,
            long_magnitude=1.3,
        )
        scaling, lengths = scaling.instantiate(), tf.constant([[4, 4], [5, 9]])
        found = scaling.timescales(8, 100.0, lengths)[:, :, 0]
        for row, factors in enumerate((short, long)):
            for pair, factor in enumerate(factors):
                expected = factor * 100.0 ** (2 * pair / 8)
                assert_close(found[row, :, pair], [expected, expected], "float32")
        assert_close(scaling.magnitude(lengths)[:, :, 0, 0], [[1.1, 1.1], [1.3, 1.3]], "float32")
        with self.assertRaisesRegex(ValueError, "short_factors: 4 factors for 6 rotated dim"):
            scaling.timescales(6, 100.0, lengths)

    def test_alpha_multiplies_the_base(self):
        scaling = AlphaNTKScaling.params().set(alpha=50.0).instantiate(path="scaling")
        base = 100.0 * 50.0 ** (8 / 6)
        expected = [base ** (2 * pair / 8) for pair in range(4)]
        assert_close(scaling.timescales(8, 100.0), expected, "float32")
        with self.assertRaisesRegex(ValueError, "scaling: AlphaNTKScaling with 2 rotated dim"):
            scaling.timescales(2, 100.0)

    def test_rejects_invalid_options(self):
        p = PublishedAttention.params().set(model_dim=8, num_heads=2, rotary_fraction=1.0)
        with self.assertRaisesRegex(ValueError, "rotary_pairs is 'neighbours'; expected 'halves'"):
            p.set(rotary_pairs="neighbours")
        p.rotary_scaling = Llama3Scaling.params().set(high_frequency_factor=0.5)
        message = "rotary_scaling.high_frequency_factor: 0.5; .*low_frequency_factor, 1.0, or more"
        with self.assertRaisesRegex(ValueError, f"attention.{message}"):
            p.instantiate(path="attention")


if __name__ == "__main__":
    testing.main()
