"""RingKernel: queries stay on their devices while keys and values rotate around the devices.

Liu et al. 2023, arXiv 2310.01889, section 3.
"""

from __future__ import annotations

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers.attention import running_softmax
from lingvo_gshard.layers.attention.kernel import AttentionKernel
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.attention.ring_pass import PARTS, RingPass, annotate_segments
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.partitioning import parts_of

LOCAL_LETTERS = {"s": "positions of queries within a part of a row"}


class RingKernel(AttentionKernel):
    """Attends to one part of the keys at a time while devices pass the parts around a ring.

    Rows are cut into as many parts as the current partitioning splits L into. Without a
    partitioning, or if it does not split L, there is one part, and nothing rotates.

    There is no manual region. The parts are a dimension that is sharded over the mesh, so that the
    partitioner generates local products and one collective-permute per step.
    """

    keys_layout = "BNLD"

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "block_size",
            0,
            "Keys of a part that are attended to at a time; 0: all of them.",
            minimum=0,
        )
        return p

    def attend(
        self,
        query_BNLD: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        mask: AttentionMask,
        logit_cap: float = 0.0,
        relative_bias_NLK: tf.Tensor | None = None,
        dropout_BNLK: tf.Tensor | None = None,
        sinks_N: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the attention output [B,N,L,D], as the base class describes.

        Raises:
          UserError: L or K does not divide into equal parts.
        """
        del relative_bias_NLK, dropout_BNLK
        parts = self._parts(query_BNLD, keys_BNKD)

        # Segments are arguments: TensorFlow does not capture a tensor that only a loop in a
        # gradient reads.
        @custom_gradient
        def compute(
            query_BNLD: tf.Tensor,
            keys_BNKD: tf.Tensor,
            values_BNKD: tf.Tensor,
            segments_BL: tf.Tensor,
            key_segments_BK: tf.Tensor,
            *sinks: tf.Tensor,
        ):
            query = annotate(_split(query_BNLD, parts, PARTS), "BNLsD")
            segments = annotate_segments(_split(segments_BL, parts, 1), "BLs")
            keys_per_part = keys_BNKD.shape[2] // parts
            ring = RingPass(mask, logit_cap, self.p.block_size, query, segments, keys_per_part)
            keys, values = (_split(x, parts, PARTS) for x in (keys_BNKD, values_BNKD))
            block = ring.padded_block(keys, values, _split(key_segments_BK, parts, 1))
            sums = ring.forward(block, *sinks)
            mixed = sums.result(query.dtype)

            def gradient(d_BNLD: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
                d_mixed = annotate(_split(d_BNLD, parts, PARTS), "BNLsD")
                statistics = sums.statistics(d_mixed, mixed)
                gradients = ring.backward(block, d_mixed, statistics)
                d_query, d_keys, d_values = (tf.cast(x, query.dtype) for x in gradients)
                return (
                    annotate(_join(d_query, query_BNLD.shape), "BNLD"),
                    _join(d_keys, keys_BNKD.shape),
                    _join(d_values, values_BNKD.shape),
                    None,
                    None,
                    *(running_softmax.sink_gradients(statistics, x_N) for x_N in sinks),
                )

            return annotate(_join(mixed, query_BNLD.shape), "BNLD"), gradient

        segments = mask.explicit_segments(query_BNLD, keys_BNKD)
        sinks = [] if sinks_N is None else [sinks_N]
        return compute(query_BNLD, keys_BNKD, values_BNKD, *segments, *sinks)

    def _parts(self, query_BNLD: tf.Tensor, keys_BNKD: tf.Tensor) -> int:
        """Returns the number of parts of a row; ValueError if they are not equal."""
        parts = parts_of("BNLD")[PARTS]
        for letter, length in (("L", query_BNLD.shape[2]), ("K", keys_BNKD.shape[2])):
            if length % parts:
                raise UserError(
                    f"{self.path}: a ring of {parts} devices needs equal parts of rows, and "
                    f"{letter} is {length}; a multiple of {parts} was expected"
                )
        return parts


def _split(x: tf.Tensor, parts: int, dimension: int) -> tf.Tensor:
    """Splits one dimension into parts and positions within a part."""
    shape = x.shape.as_list()
    split = [parts, shape[dimension] // parts]
    return tf.reshape(x, [*shape[:dimension], *split, *shape[dimension + 1 :]])


def _join(x: tf.Tensor, shape_BNLD: tf.TensorShape) -> tf.Tensor:
    """Reverses `_split` of dimension PARTS, and drops the padding of blocks."""
    batch, heads, length, _ = shape_BNLD.as_list()
    parts = x.shape[PARTS]
    return tf.reshape(x[:, :, :, : length // parts], [batch, heads, length, x.shape[-1]])
