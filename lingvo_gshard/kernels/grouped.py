"""Grouped products: rows sorted by group, each multiplied by the weights of its group."""

from __future__ import annotations

from typing import Any, cast

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.kernels import grouped_tpu, grouped_triton
from lingvo_gshard.kernels.grouped_call import GroupedCall
from lingvo_gshard.kernels.kernel import Kernel, hardware_of, platform_in_use, register

# Name of the kernel in plans and logs.
NAME = "grouped products"

_MODULES = {"tpu": grouped_tpu, "cuda": grouped_triton}

FORWARD = register(
    Kernel(
        "grouped_products",
        GroupedCall,
        {"tpu": grouped_tpu.forward, "cuda": grouped_triton.forward},
    )
)
WEIGHT_GRADIENT = register(
    Kernel(
        "grouped_products_gradient",
        GroupedCall,
        {"tpu": grouped_tpu.weight_gradient, "cuda": grouped_triton.weight_gradient},
    )
)


def _module(platform: str) -> Any:
    return _MODULES[hardware_of(platform)]


def obstacle(platform: str, rows: int, weights_EMH: tf.Tensor, dtype: str) -> str:
    """Returns why a platform's kernel cannot compute grouped products; "" if it can.

    Args:
      platform: one of `kernel.PLATFORMS`.
      rows: number of rows of all groups.
      weights_EMH: the weights of each group.
      dtype: type of the rows.
    """
    weights = tuple(known_sizes(weights_EMH.shape))
    return _module(platform).obstacle((rows, weights[1]), weights, dtype)


def padded_rows(platform: str, rows: int, usual_rows: int, groups: int) -> int:
    """Returns the number of rows of an array that the kernel reads without a padded copy.

    Args:
      platform: one of `kernel.PLATFORMS`.
      rows: number of rows that there is room for.
      usual_rows: as in `product`.
      groups: number of groups.
    """
    return _module(platform).padded_rows(GroupedCall(usual_rows), rows, groups)


def product(
    rows_RM: tf.Tensor,
    weights_EMH: tf.Tensor,
    sizes_E: tf.Tensor,
    usual_rows: int = 0,
    known_RH: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns [R,H]: each row times the weights of its group, on one device.

    Rows after the last group are undefined in the result and in the gradient of the rows. The
    gradient of the weights ignores them.

    Args:
      rows_RM: the rows of all groups, one group after another.
      weights_EMH: the weights of each group, in the type of the rows.
      sizes_E: int32, the number of rows of each group; together at most R.
      usual_rows: the number of rows that all groups have together in most steps; 0: all rows.
      known_RH: the result, if it was saved and needs no computation.
    """
    count = known_sizes(rows_RM.shape)[0]
    groups, inner, outer = known_sizes(weights_EMH.shape)
    call = GroupedCall(usual_rows or count)
    transposed = GroupedCall(call.usual_rows, is_transposed=True)
    share = _module(platform_in_use()).computed_share(call, count, groups)
    read_share = call.groups_with_rows(groups) / groups

    @custom_gradient
    def compute(rows: tf.Tensor, weights: tf.Tensor, sizes: tf.Tensor) -> Any:
        products = known_RH
        if products is None:
            products_RH = tf.TensorSpec([count, outer], rows.dtype)
            (products,) = FORWARD.mark(
                call, [rows, weights, sizes], [products_RH], share, read_share
            )

        def gradient(d_products: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, None]:
            d_rows_RM = tf.TensorSpec([count, inner], rows.dtype)
            d_weights_EMH = tf.TensorSpec([groups, inner, outer], weights.dtype)
            (d_rows,) = FORWARD.mark(
                transposed, [d_products, weights, sizes], [d_rows_RM], share, read_share
            )
            (d_weights,) = WEIGHT_GRADIENT.mark(
                call, [rows, d_products, sizes], [d_weights_EMH], share
            )
            return d_rows, d_weights, None

        return tf.identity(products), gradient

    return cast(tf.Tensor, compute(rows_RM, weights_EMH, sizes_E))
