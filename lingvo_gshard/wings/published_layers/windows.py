"""Windows of tokens that are compressed to one key each (DeepSeek-V4, sections 2.3.1 and 2.3.2)."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import (
    BIAS,
    Layer,
    NestedMap,
    Params,
    custom_gradient,
    initializers,
    known_sizes,
    layer_method,
    tf,
)
from lingvo_gshard.layers import MASKED, RMSNorm, RotaryScaling, product, rotary
from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings.published_layers import rotary_pairs

LOCAL_LETTERS = {"s": "series of values of a token", "w": "tokens of a window"}


@dataclasses.dataclass(frozen=True)
class Windows:
    """The complete windows of the texts of packed rows. The first one begins with its text.

    K counts the most windows that a row can have. Windows that do not exist are the last ones.

    Attributes:
      size: tokens of a window.
      end_BK: int32, place of the last token of each window in its row.
      start_BK: int32, position of the first token of each window in its text.
      visible_BLK: bool, whether a token sees a window: the window ends in the token's text, and no
        later than there.
      slot_BL: int32, place of each token among the tokens of all windows; -1 for none.
    """

    size: int
    end_BK: tf.Tensor
    start_BK: tf.Tensor
    visible_BLK: tf.Tensor
    slot_BL: tf.Tensor

    @classmethod
    def of(cls, index_BL: tf.Tensor, segments_BL: tf.Tensor, size: int) -> Windows:
        """Returns the windows of rows with at least `size` positions.

        Args:
          index_BL: int32 position of each token in its text.
          segments_BL: int32 segments, 0 in padding.
        """
        length = known_sizes(segments_BL.shape)[1]
        index_BL, segments_BL = (annotate(x, "BL", unsplit="L") for x in (index_BL, segments_BL))
        closes_BL = tf.equal((index_BL + 1) % size, 0) & (segments_BL > 0)
        count_BL, number_K = tf.cumsum(tf.cast(closes_BL, tf.int32), 1), tf.range(length // size)
        # A token is before the end of window k if at most k windows have ended so far.
        is_earlier_BLK = count_BL[..., None] <= number_K
        end_BK = tf.reduce_sum(tf.cast(is_earlier_BLK, tf.int32), 1)
        exists_BK = end_BK < length
        end_BK = tf.where(exists_BK, end_BK, size - 1)
        is_same_BLK = tf.equal(
            segments_BL[:, :, None], tf.gather(segments_BL, end_BK, batch_dims=1)[:, None]
        )
        # As many windows end before a token as there are before its own.
        number_BL = count_BL - tf.cast(closes_BL, tf.int32)
        own_BL = tf.minimum(number_BL, length // size - 1)
        offset_BL = tf.range(length) + size - 1 - tf.gather(end_BK, own_BL, batch_dims=1)
        is_inside_BL = tf.equal(own_BL, number_BL) & (offset_BL >= 0) & (offset_BL < size)
        return cls(
            size,
            end_BK,
            tf.gather(index_BL, end_BK, batch_dims=1) - (size - 1),
            exists_BK[:, None] & is_same_BLK & ~is_earlier_BLK,
            tf.where(is_inside_BL, number_BL * size + offset_BL, -1),
        )

    def split(self, x_BLsD: tf.Tensor) -> tf.Tensor:
        """Returns the tokens [B,K,w,s,D] of each window."""
        batch, _, *rest = known_sizes(x_BLsD.shape)
        first_BK1 = self.end_BK[..., None] - (self.size - 1)

        @custom_gradient
        def compute(x_BLsD: tf.Tensor):
            def gradient(d_BKwsD: tf.Tensor) -> tf.Tensor:
                # A token is in one window at most.
                flat = tf.reshape(d_BKwsD, [batch, -1, *rest])
                found = tf.gather(flat, tf.maximum(self.slot_BL, 0), batch_dims=1)
                is_there = (self.slot_BL >= 0)[..., None, None]
                return annotate(tf.where(is_there, found, tf.zeros([], found.dtype)), "BLsD")

            return tf.gather(x_BLsD, first_BK1 + tf.range(self.size), batch_dims=1), gradient

        return annotate(compute(annotate(x_BLsD, "BLsD", unsplit="L")), "BKwsD")


class WindowCompressor(Layer):
    """Makes one key of each window: a mean of its tokens' values, weighted for each dimension.

    The weights are a softmax of other products with the input, and of a bias for each place of the
    window. If windows overlap, a token has a second series of values and of weights, which the next
    window reads.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("key_dim", 0, "Size of D.", minimum=1)
        p.define("rotary_dim", 0, "Size of the last part of a key, which rotates.", minimum=2)
        p.define("size", 0, "Tokens of a window.", minimum=1)
        p.define("overlaps", False, "Whether a window also reads the tokens of the one before.")
        p.define("norm", RMSNorm.params(), "Params of the norm of keys.")
        p.define("is_frozen", False, "Whether the weights stay as they are.")
        rotary.define_rotation(p)
        rotary_pairs.define(p)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        self.scaling: RotaryScaling = p.rotary_scaling.instantiate(path=f"{path}.rotary_scaling")
        sizes = {"M": p.model_dim, "s": 1 + p.overlaps, "D": p.key_dim, "w": p.size}
        init, zeros = initializers.fan_in(p.model_dim), initializers.constant(0.0)
        for name in ("w_value", "w_weight"):
            self.create_variable(name, "MsD", sizes, init, inputs="M", is_frozen=p.is_frozen)
        self.create_variable("b_place", "wsD", sizes, zeros, role=BIAS, is_frozen=p.is_frozen)
        self.create_child("norm", p.norm.copy().set(model_dim=p.key_dim))

    @layer_method
    def project(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns the values and the logits of their weights, joined along s: [B,L,s,D]."""
        names = ("w_value", "w_weight")
        return tf.concat([product(self, theta, n, "BLM,MsD->BLsD", x_BLM) for n in names], 2)

    @layer_method
    def pool(self, theta: NestedMap, both_BKwsD: tf.Tensor, start_BK: tf.Tensor) -> tf.Tensor:
        """Returns the key [B,K,D] of each window, normalized and rotated.

        Args:
          both_BKwsD: what `project` returned for the tokens of windows, in order.
          start_BK: int32, position of the first token of each window in its text.
        """
        values, logits = tf.split(tf.cast(both_BKwsD, tf.float32), 2, 3)
        logits += tf.cast(theta.b_place, tf.float32)
        if self.p.overlaps:
            is_later = (start_BK > 0)[:, :, None, None]
            values, logits = (_with_window_before(x) for x in (values, logits))
            before, own = tf.split(logits, 2, 2)
            logits = tf.concat([tf.where(is_later, before, MASKED), own], 2)
        else:
            values, logits = values[:, :, :, 0], logits[:, :, :, 0]
        key_BKD = tf.reduce_sum(values * tf.nn.softmax(logits, 2), 2)
        key_BKD = self.norm.fprop(theta.norm, tf.cast(key_BKD, both_BKwsD.dtype))
        positions = rotary.TextPositions(start_BK)
        return rotate_last(key_BKD[:, :, None], positions, self.p, self.scaling)[:, :, 0]


def _with_window_before(x_BKwsD: tf.Tensor) -> tf.Tensor:
    """Returns the first series of the window before, then the second series: [B,K,2w,D]."""
    before, own = tf.unstack(x_BKwsD, axis=3)
    return tf.concat([tf.pad(before[:, :-1], [[0, 0], [1, 0], [0, 0], [0, 0]]), own], 2)


def rotate_last(
    x_BLND: tf.Tensor, positions: rotary.TextPositions, p: Params, scaling: RotaryScaling
) -> tf.Tensor:
    """Returns x with the last `p.rotary_dim` of D rotated."""
    plain, turned = tf.split(x_BLND, [x_BLND.shape[-1] - p.rotary_dim, p.rotary_dim], -1)
    return tf.concat([plain, rotary_pairs.rotate(turned, positions, 1.0, p, scaling)], -1)
