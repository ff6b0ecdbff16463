"""UlyssesKernel: devices exchange positions for heads, and each attends to whole rows.

Jacobs et al. 2023, arXiv 2309.14509, section 3.
"""

from __future__ import annotations

import dataclasses
import math

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers import (
    PLAIN,
    AttentionKernel,
    AttentionMask,
    DenseKernel,
    SoftmaxOptions,
    repeat_heads,
)
from lingvo_gshard.sharding import (
    Partitioning,
    Strategy,
    annotate,
    axes_of,
    current_partitioning,
    use_partitioning,
)


class UlyssesKernel(AttentionKernel):
    """Attends with each device's share of the heads to whole rows, by another kernel.

    Queries, keys and values arrive split by position. One all-to-all each splits them by heads
    instead, beside the axes that split heads already, and one splits the outputs by position again.
    Without a partitioning, or if it does not split L, the inner kernel computes everything.
    """

    keys_layout = "BNLD"

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "inner",
            DenseKernel.params(),
            "The kernel that attends to whole rows. Without the platform's fused kernel, "
            "BlockwiseKernel keeps its logits small.",
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.inner: AttentionKernel = self.p.inner.instantiate(path=path)

    @property
    def uses_fused(self) -> bool:
        return self.inner.uses_fused

    def prepare(self, mask: AttentionMask) -> AttentionMask:
        """Returns the mask as the inner kernel wants it, for whole rows."""
        with use_partitioning(self._by_heads()):
            return self.inner.prepare(mask)

    def attend(
        self,
        query_BNLD: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        mask: AttentionMask,
        softmax: SoftmaxOptions = PLAIN,
    ) -> tf.Tensor:
        """Returns the attention output [B,N,L,D], as the base class describes.

        Raises:
          UserError: the heads do not divide over the devices.
        """
        heads, partitioning = query_BNLD.shape[1], self._by_heads()
        parts = 1 if partitioning is None else partitioning.parts(partitioning.split("N")[0])
        if heads % parts:
            raise UserError(
                f"{self.path}: UlyssesKernel splits heads over {parts} devices, and there are "
                f"{heads}; a multiple of {parts} was expected. RingKernel takes any number"
            )
        # Of fewer heads than devices, some devices need the same one.
        shared = math.lcm(keys_BNKD.shape[1], parts)
        keys_BNKD, values_BNKD = (repeat_heads(x, shared, "BNLD") for x in (keys_BNKD, values_BNKD))
        with use_partitioning(partitioning):
            arrays = (
                annotate(query_BNLD, "BNLD"),
                annotate(keys_BNKD, "BNKD"),
                annotate(values_BNKD, "BNKD"),
            )
            mixed_BNLD = annotate(self.inner.attend(*arrays, mask, softmax), "BNLD")
        return annotate(mixed_BNLD, "BNLD")

    def _by_heads(self) -> Partitioning | None:
        """Returns the current partitioning with heads in place of positions.

        Axes of positions become the minor axes of heads, so that devices exchange only with those
        that have other positions of the same heads.
        """
        partitioning = current_partitioning()
        if partitioning is None:
            return None
        rows, heads, positions, dims = axes_of("BNLD")
        split = {"B": rows, "N": heads + positions, "D": dims}
        strategy = Strategy(f"{partitioning.strategy.name} by heads", split, {}, {})
        return dataclasses.replace(partitioning, strategy=strategy, overrides=())
