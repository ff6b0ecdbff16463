"""Rows moved to places of their own and back, by index, forward and backward.

What gather.py does for groups and their buffers is done here without groups: a place holds at most
one token, a token has a place for each of its choices, and the gradient of a gather is a gather.
"""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient


class PlacesOfRows:
    """place_KT: int32, of each choice of each token, `places` where there is none."""

    def __init__(self, place_KT: tf.Tensor, places: int):
        choices, tokens = place_KT.shape.as_list()
        self._places = tf.unstack(place_KT)
        entries = choices * tokens
        flat = tf.reshape(place_KT, [entries, 1])
        nobody = tf.fill([places + 1], entries)
        entry = tf.tensor_scatter_nd_update(nobody, flat, tf.range(entries))[:places]
        self._entry = entry
        # The row after the last token is the one that empty places point at.
        self._token = tf.where(entry < entries, entry % tokens, tokens)

    def fill(self, x_TM: tf.Tensor) -> tf.Tensor:
        """Returns [places,M]: the tokens' rows at their places, zeros at those that are empty."""

        @custom_gradient
        def move(x: tf.Tensor):
            def gradient(d_rows: tf.Tensor) -> tf.Tensor:
                padded = _append_zeros(d_rows)
                return tf.add_n([tf.gather(padded, place) for place in self._places])

            return tf.gather(_append_zeros(x), self._token), gradient

        return move(x_TM)

    def collect(self, rows_PM: tf.Tensor, gate_KT: tf.Tensor) -> tf.Tensor:
        """Returns [T,M]: each token's sum of the rows at its places times gates, in their type."""
        dtype = rows_PM.dtype

        @custom_gradient
        def move(rows: tf.Tensor, gates: tf.Tensor):
            padded = _append_zeros(rows)
            picked = [tf.gather(padded, place) for place in self._places]
            weights = tf.unstack(tf.cast(gates, dtype)[..., tf.newaxis])
            scaled = [row * weight for row, weight in zip(picked, weights, strict=True)]

            def gradient(d_y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                d_gates = [tf.reduce_sum(tf.cast(d_y * row, tf.float32), -1) for row in picked]
                flat = tf.concat([tf.reshape(gates, [-1]), [0.0]], 0)
                gate_P1 = tf.cast(tf.gather(flat, self._entry), dtype)[:, tf.newaxis]
                d_rows = tf.gather(_append_zeros(d_y), self._token) * gate_P1
                return d_rows, tf.stack(d_gates)

            return tf.add_n(scaled), gradient

        return move(rows_PM, gate_KT)


def _append_zeros(x: tf.Tensor) -> tf.Tensor:
    return tf.pad(x, [[0, 1], [0, 0]])
