"""Tests AttentionMask: its bias, and masks as elements of nested structures."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.attention.mask import AttentionMask

SEGMENTS = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 2, 2]], np.int32)
B, L = SEGMENTS.shape


def sees(b: int, q: int, k: int, is_causal: bool, window: int) -> bool:
    in_segment = SEGMENTS[b, q] == SEGMENTS[b, k] != 0
    in_window = not window or abs(q - k) <= window
    return in_segment and in_window and (k <= q or not is_causal)


class MaskTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(window=[0, 1], is_causal=[False, True])
    def test_the_bias_is_zero_for_visible_keys(self, is_causal, window):
        mask = AttentionMask(tf.constant(SEGMENTS), is_causal=is_causal, window=window)
        bias = mask.bias(L, L).numpy()
        self.assertEqual(bias.shape, (B, 1, L, L))
        self.assertEqual(bias.dtype, np.float32)
        for b, q, k in np.ndindex(B, L, L):
            if sees(b, q, k, is_causal, window):
                self.assertEqual(bias[b, 0, q, k], 0)
            else:
                self.assertLess(bias[b, 0, q, k], -1e8)
        self.assertAllEqual(mask.with_bias().bias_B1LK, bias)

    def test_one_step_of_decoding_sees_the_keys_up_to_its_position(self):
        bias = AttentionMask(is_causal=True, first_query=tf.constant(2)).bias(1, L)
        self.assertAllEqual(bias[0, 0, 0] == 0, [True, True, True, False, False])

    def test_masks_can_be_flattened_and_packed(self):
        mask = AttentionMask(tf.constant(SEGMENTS), is_causal=True, window=3).with_bias()
        flat = tf.nest.flatten((mask, tf.zeros([1])))
        self.assertEqual([tuple(x.shape) for x in flat], [(B, L), (B, 1, L, L), (1,)])
        packed, _ = tf.nest.pack_sequence_as((mask, 0), [x + 1 for x in flat])
        self.assertEqual((packed.is_causal, packed.window, packed.key_segments_BK), (True, 3, None))
        self.assertAllEqual(packed.segments_BL, SEGMENTS + 1)
        self.assertAllEqual(packed.bias_B1LK, mask.bias_B1LK + 1)


if __name__ == "__main__":
    testing.main()
