"""Products of rows sorted by expert with the weights of their experts, by the platform's kernel."""

from __future__ import annotations

import dataclasses

from lingvo_gshard import kernels
from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.dense import add_bias
from lingvo_gshard.layers.lora import CHILD
from lingvo_gshard.layers.products import ProductContext, is_stored

LOCAL_LETTERS = {"r": "rows sorted by expert, with room for more than there are"}

# By the name of a weight: the layouts of the operands and the result of its product with the rows
# of one expert, for the remat policy.
_HIDDEN, _OUTPUT = ("CM", "EMH", "CH"), ("CH", "EHM", "CM")


def obstacle(platform: str, rows: int, dtype: tf.DType, theta: NestedMap) -> str:
    """Returns why the platform's kernel cannot compute the products of experts; "" if it can.

    Args:
      platform: one of `kernels.kernel.PLATFORMS`.
      rows: the number of rows of all experts.
      dtype: type of the rows.
      theta: the weights of the experts.
    """
    if CHILD in theta and theta[CHILD]:
        return "its weights have adapters"
    weights = [weight for name, weight in theta.items() if name.startswith("w_")]
    if any(map(is_stored, weights)):
        return "its weights are int8"
    is_rounded = context.extension(ProductContext).rounding is not None
    found = [kernels.grouped.obstacle(platform, rows, w, dtype.name, is_rounded) for w in weights]
    return next(filter(None, found), "")


def platform_for(rows: int, dtype: tf.DType, theta: NestedMap) -> str:
    """Returns the platform whose kernel computes the products of experts; "" if none does.

    Whether a layer uses the kernel, or why not, is recorded: see `kernels.kernel.recording`.

    Args:
      rows: the number of rows of all experts.
      dtype: type of the rows.
      theta: the weights of the experts.
    """
    platform = kernels.kernel.platform_in_use()
    if not platform:
        return ""
    found = obstacle(platform, rows, dtype, theta)
    kernels.kernel.note(context.layer_path(), kernels.grouped.NAME, found)
    return "" if found else platform


@dataclasses.dataclass(frozen=True)
class SortedGroups:
    """The rows of experts, one expert after another.

    Attributes:
      load_E: int32, the number of rows of each expert.
      usual_rows: the number of rows of all experts in most steps.
    """

    load_E: tf.Tensor
    usual_rows: int

    def multiply(self, x_rM: tf.Tensor, weight_EMH: tf.Tensor, is_output: bool) -> tf.Tensor:
        """Returns [r,H]: each row times the weight of its expert.

        In a remat unit, the result may be a saved one instead (see core/autodiff/remat_policy.py).

        Args:
          x_rM: the rows.
          weight_EMH: the weights of the experts.
          is_output: whether the result is the experts' output, and not hidden.
        """
        layouts = _OUTPUT if is_output else _HIDDEN
        saved = context.current().saved_products
        known = saved.restore(*layouts) if saved else None
        weight_EMH = tf.cast(weight_EMH, x_rM.dtype)
        rounding = context.extension(ProductContext).rounding
        y = kernels.grouped.product(x_rM, weight_EMH, self.load_E, self.usual_rows, known, rounding)
        if saved:
            saved.save(*layouts, y)
        return y

    def add_bias(self, x_rH: tf.Tensor, bias_EH: tf.Tensor) -> tf.Tensor:
        """Returns each row plus the bias of its expert, in the type of the rows."""
        last_E = tf.cumsum(self.load_E)
        index_r = tf.range(x_rH.shape[0])
        experts = bias_EH.shape[0]
        # The number of experts whose rows all come before this one; E after the last expert's rows.
        expert_r = tf.reduce_sum(tf.cast(index_r[:, tf.newaxis] >= last_E, tf.int32), 1)

        @custom_gradient
        def bias_of_rows(bias: tf.Tensor):
            def gradient(d_bias_rH: tf.Tensor) -> tf.Tensor:
                # Rows that no expert has are undefined, and 0 times undefined may be NaN.
                is_used = (expert_r < experts)[:, tf.newaxis]
                d_used = tf.where(is_used, d_bias_rH, tf.zeros_like(d_bias_rH))
                of_expert_rE = tf.one_hot(expert_r, experts, dtype=d_used.dtype)
                # A product, because TPUs scatter one row after another.
                return tf.linalg.matmul(of_expert_rE, d_used, transpose_a=True)

            return tf.gather(bias, tf.minimum(expert_r, experts - 1)), gradient

        return add_bias(x_rH, bias_of_rows(tf.cast(bias_EH, tf.float32)))
