"""CrossAttention: each position of a packed row attends to a memory."""

from __future__ import annotations

from lingvo_gshard.core import NestedMap, layer_method, tf
from lingvo_gshard.layers.attention.kernel import heads_first
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.attention.multi_head_attention import MultiHeadAttention


class CrossAttention(MultiHeadAttention):
    """Attention of a row to a memory, such as the output of an encoder."""

    def mask(self, segments_BL: tf.Tensor, memory_segments_BK: tf.Tensor) -> AttentionMask:
        """Returns the mask of packed rows, prepared for all layers with the same Params.

        Args:
          segments_BL: int32 segment of each token of x, 0 in padding.
          memory_segments_BK: int32 segment of each position of the memory, 0 in padding.
        """
        return self.kernel.prepare(AttentionMask(segments_BL, memory_segments_BK))

    @layer_method
    def fprop(
        self, theta: NestedMap, x_BLM: tf.Tensor, memory_BKM: tf.Tensor, mask: AttentionMask
    ) -> tf.Tensor:
        """Returns [B,L,M]: each position of x attends to the memory that the mask allows.

        Args:
          mask: `self.mask` of the segments of x and of the memory.
        """
        query_BLND = self.project_query(theta, x_BLM)
        layout = self.kernel.keys_layout
        keys_BNKD, values_BNKD = (
            heads_first(x, layout) for x in self.project_memory(theta, memory_BKM)
        )
        return self._attend(theta, self.kernel, query_BLND, keys_BNKD, values_BNKD, mask)

    def joined_products(self) -> list[tuple[str, ...]]:
        return [("w_query",), ("w_key", "w_value")]

    @layer_method
    def project_query(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        (query_BLND,) = self._project(theta, x_BLM, "w_query")
        return self._normalize("query", theta, query_BLND)

    @layer_method
    def project_memory(
        self, theta: NestedMap, memory_BKM: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        key_BKND, value_BKND = self._project(theta, memory_BKM, "w_key", "w_value")
        return self._normalize("key", theta, key_BKND), value_BKND
