"""AttentionMask: its bias, and masks as elements of nested structures."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers.attention.mask import AttentionMask

SEGMENTS = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 2, 2]], np.int32)
B, L = SEGMENTS.shape


def sees(b: int, q: int, k: int, is_causal: bool, window: int) -> bool:
    in_segment = SEGMENTS[b, q] == SEGMENTS[b, k] != 0
    in_window = not window or abs(q - k) <= window
    return in_segment and in_window and (k <= q or not is_causal)


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_bias_is_zero_for_visible_keys(is_causal, window):
    mask = AttentionMask(tf.constant(SEGMENTS), is_causal=is_causal, window=window)
    bias = mask.bias(L, L).numpy()
    assert bias.shape == (B, 1, L, L) and bias.dtype == np.float32
    for b, q, k in np.ndindex(B, L, L):
        is_visible = sees(b, q, k, is_causal, window)
        assert bias[b, 0, q, k] == 0 if is_visible else bias[b, 0, q, k] < -1e8
    np.testing.assert_array_equal(mask.with_bias().bias_B1LK, bias)


def test_one_step_of_decoding_sees_the_keys_up_to_its_position():
    bias = AttentionMask(is_causal=True, first_query=tf.constant(2)).bias(1, L)
    np.testing.assert_array_equal(bias[0, 0, 0] == 0, [True, True, True, False, False])


def test_masks_can_be_flattened_and_packed():
    mask = AttentionMask(tf.constant(SEGMENTS), is_causal=True, window=3).with_bias()
    flat = tf.nest.flatten((mask, tf.zeros([1])))
    assert [tuple(x.shape) for x in flat] == [(B, L), (B, 1, L, L), (1,)]
    packed, _ = tf.nest.pack_sequence_as((mask, 0), [x + 1 for x in flat])
    assert (packed.is_causal, packed.window, packed.key_segments_BK) == (True, 3, None)
    np.testing.assert_array_equal(packed.segments_BL, SEGMENTS + 1)
    np.testing.assert_array_equal(packed.bias_B1LK, mask.bias_B1LK + 1)
