"""Master weights: float32 weights that each step casts and gathers for its layers.

With a precision of 16-bit activations, the optimizer updates weights in float32 and products read
them in 16 bits. A strategy may split moments further than weights, as zero1 does. Master weights
are then stored and updated split like their moments, and the step begins by gathering a copy. The
factors of products are rounded to 16 bits before they are gathered, which halves the bytes.
"""

from __future__ import annotations

from lingvo_gshard.core.layer import TABLE, VariableSpec
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate_like
from lingvo_gshard.sharding.partitioning import MASTERS, current_partitioning


def gathered(specs: NestedMap, theta: NestedMap, dtype: str, table_dtype: str) -> NestedMap:
    """Returns the weights that layers compute with.

    Without a partitioning, and if weights are split as their master weights are, these are the
    master weights.

    Args:
      specs: the weights' tree of VariableSpec.
      theta: the master weights.
      dtype: the type of activations, which layers cast the factors of products to.
      table_dtype: the type that layers round rows of tables to; empty if they do not.
    """

    def narrow(spec: VariableSpec) -> str:
        return dtype if spec.inputs else table_dtype if spec.role == TABLE else ""

    pairs = zip(specs.flatten(), theta.flatten(), strict=True)
    return theta.pack(_gathered(spec, weight, narrow(spec)) for spec, weight in pairs)


def _gathered(spec: VariableSpec, master: tf.Tensor, dtype: str) -> tf.Tensor:
    current = None if tf.executing_eagerly() else current_partitioning()
    if current is None or current.spec_split(spec, MASTERS) == current.spec_split(spec):
        return master
    if dtype:
        master = annotate_like(tf.cast(master, dtype), spec, MASTERS)
    return annotate_like(master, spec)
