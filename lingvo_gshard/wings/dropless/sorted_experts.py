"""Products of rows sorted by expert with the weights of their experts, by the platform's kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core import NestedMap, context, custom_gradient, kernel_use, layer_method, tf
from lingvo_gshard.layers import Experts, add_bias, feed_forward, products
from lingvo_gshard.sharding import platform_in_use
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.kernels.activation_call import ActivationCall

LOCAL_LETTERS = {"r": "rows sorted by expert, with room for more than there are"}

# By the name of a weight: the layouts of the operands and the result of its product with the rows
# of one expert, for the remat policy.
_HIDDEN, _OUTPUT = ("CM", "EMH", "CH"), ("CH", "EHM", "CM")


def obstacle(platform: str, rows: int, dtype: tf.DType, theta: NestedMap) -> str:
    """Returns why the platform's kernel cannot compute the products of experts; "" if it can.

    Args:
      platform: one of `platforms.PLATFORMS`.
    """
    if found := products.obstacle(theta):
        return found
    weights = [weight for name, weight in theta.items() if name.startswith("w_")]
    is_rounded = context.extension(products.ProductContext).rounding is not None
    obstacles = [
        kernels.grouped.obstacle(platform, rows, w, dtype.name, is_rounded) for w in weights
    ]
    return next(filter(None, obstacles), "")


def platform_for(rows: int, dtype: tf.DType, theta: NestedMap) -> str:
    """Returns the platform whose kernel computes the products of experts; "" if none does.

    Whether a layer uses the kernel, or why not, is recorded: see `kernel_use.recording`.
    """
    platform = platform_in_use()
    if not platform:
        return ""
    found = obstacle(platform, rows, dtype, theta)
    kernel_use.note(context.layer_path(), kernels.grouped.NAME, found)
    return "" if found else platform


@layer_method
def compute_sorted(
    experts: Experts, theta: NestedMap, x_rM: tf.Tensor, load_E: tf.Tensor, usual_rows: int
) -> tf.Tensor:
    """Returns [r,M]: the experts' outputs for rows sorted by expert, by the platform's kernel.

    Rows after the last expert's are undefined. Training in 8 bits rounds as `Experts.compute_one`
    does.

    Args:
      theta: the experts' weights, without an `obstacle`.
      x_rM: the rows of all experts, one expert after another.
      load_E: int32, the number of rows of each expert.
      usual_rows: the number of rows of all experts in most steps.
    """
    groups = SortedGroups(load_E, usual_rows)
    weights = [theta[f"w_{name}"] for name in experts.input_products]

    def add(x: tf.Tensor, name: str) -> tf.Tensor:
        return groups.add_bias(x, theta[name]) if experts.p.use_bias else x

    with products.rounded_by_rows():
        hidden = groups.multiply(x_rM, weights, is_output=False)
        if _is_activated_alone(experts):
            activation = ActivationCall(**feed_forward.options(experts.p))
            return groups.multiply_activated(hidden, theta.w_out, activation)
        by_name = dict(zip(experts.input_products, hidden, strict=True))
        h = experts.activate(theta, lambda name: add(by_name[name], f"b_{name}"))
        (y,) = groups.multiply(h, [theta.w_out], is_output=True)
        return add(y, "b_out")


def _is_activated_alone(experts: Experts) -> bool:
    """Returns whether nothing but what kernels compute is between the products."""
    has_dropout = experts.p.dropout_rate and context.current().training
    rounding = context.extension(products.ProductContext).rounding
    can_activate = kernels.grouped.can_activate(platform_in_use(), experts.p.activation, rounding)
    return can_activate and not (experts.p.use_bias or has_dropout)


@dataclasses.dataclass(frozen=True)
class SortedGroups:
    """The rows of experts, one expert after another.

    Attributes:
      load_E: int32, the number of rows of each expert.
      usual_rows: the number of rows of all experts in most steps.
    """

    load_E: tf.Tensor
    usual_rows: int

    def multiply(
        self, x_rM: tf.Tensor, weights: Sequence[tf.Tensor], is_output: bool
    ) -> list[tf.Tensor]:
        """Returns [r,H] for each of the weights: each row times the weight of its expert.

        In a remat unit, a result may be a saved one instead (see core/autodiff/remat_policy.py).

        Args:
          weights: weights [E,M,H] of the experts.
          is_output: whether the results are the experts' output, and not hidden.
        """
        layouts = _OUTPUT if is_output else _HIDDEN
        cast = [tf.cast(weight, x_rM.dtype) for weight in weights]
        known = [_restored(layouts) for _ in weights]
        rounding = context.extension(products.ProductContext).rounding
        found = kernels.grouped.products(x_rM, cast, self.load_E, self.usual_rows, known, rounding)
        return [_saved(layouts, each) for each in found]

    def multiply_activated(
        self, hidden: Sequence[tf.Tensor], w_out_EHM: tf.Tensor, activation: ActivationCall
    ) -> tf.Tensor:
        """Returns the output [r,M] of the experts, without biases and dropout.

        In a remat unit, it may be a saved one instead (see core/autodiff/remat_policy.py).

        Args:
          hidden: the arrays [r,H] that the activation takes.
        """
        weights = tf.cast(w_out_EHM, hidden[0].dtype)
        known = _restored(_OUTPUT)
        found = kernels.grouped.activated_product(
            hidden,
            weights,
            self.load_E,
            activation,
            self.usual_rows,
            known,
            context.extension(products.ProductContext).rounding,
        )
        return _saved(_OUTPUT, found)

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


def _restored(layouts: tuple[str, str, str]) -> tf.Tensor | None:
    """Returns the saved result of a product in a remat unit; None if there is none."""
    saved = context.current().saved_products
    return saved.restore(*layouts) if saved else None


def _saved(layouts: tuple[str, str, str], product: tf.Tensor) -> tf.Tensor:
    """Returns the result of a product, which a remat unit may save."""
    saved = context.current().saved_products
    if saved:
        saved.save(*layouts, product)
    return product
