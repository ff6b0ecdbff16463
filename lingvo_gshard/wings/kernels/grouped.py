"""Grouped products: rows sorted by group, each multiplied by the weights of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from lingvo_gshard.core import custom_gradient, known_sizes
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.sharding import hardware_of, platform_in_use
from lingvo_gshard.sharding.einsum import Factor, Rounding
from lingvo_gshard.wings.kernels import grouped_tpu, grouped_triton
from lingvo_gshard.wings.kernels.activation_call import ActivationCall
from lingvo_gshard.wings.kernels.grouped_call import GroupedCall
from lingvo_gshard.wings.kernels.kernel import register

# Name of the kernel in plans and logs.
NAME = "grouped products"

_MODULES = {"tpu": grouped_tpu, "cuda": grouped_triton}

FORWARD = register(
    "grouped_products", GroupedCall, tpu=grouped_tpu.forward, cuda=grouped_triton.forward
)
SUMMED = register(
    "grouped_products_summed", GroupedCall, tpu=grouped_tpu.summed, cuda=grouped_triton.summed
)
ACTIVATED = register(
    "grouped_products_activated",
    GroupedCall,
    tpu=grouped_tpu.activated,
    cuda=grouped_triton.activated,
)
ACTIVATED_GRADIENT = register(
    "grouped_products_activated_gradient",
    GroupedCall,
    tpu=grouped_tpu.activated_gradient,
    cuda=grouped_triton.activated_gradient,
)
WEIGHT_GRADIENT = register(
    "grouped_products_gradient",
    GroupedCall,
    tpu=grouped_tpu.weight_gradient,
    cuda=grouped_triton.weight_gradient,
)


def _module(platform: str) -> Any:
    return _MODULES[hardware_of(platform)]


def obstacle(
    platform: str, rows: int, weights_EMH: tf.Tensor, dtype: str, is_rounded: bool = False
) -> str:
    """Returns why a platform's kernel cannot compute grouped products; "" if it can.

    Args:
      platform: one of `platforms.PLATFORMS`.
      rows: number of rows of all groups.
      weights_EMH: the weights of each group.
      dtype: type of the rows.
      is_rounded: whether factors are rounded to 8 bits.
    """
    weights = tuple(known_sizes(weights_EMH.shape))
    return _module(platform).obstacle((rows, weights[1]), weights, dtype, is_rounded)


def padded_rows(platform: str, rows: int, usual_rows: int, groups: int) -> int:
    """Returns the number of rows of an array that the kernel reads without a padded copy.

    Args:
      platform: one of `platforms.PLATFORMS`.
      rows: number of rows that there is room for.
      usual_rows: as in `products`.
      groups: number of groups.
    """
    return _module(platform).padded_rows(GroupedCall(usual_rows), rows, groups)


def products(
    rows_RM: tf.Tensor,
    weights: Sequence[tf.Tensor],
    sizes_E: tf.Tensor,
    usual_rows: int = 0,
    known: Sequence[tf.Tensor | None] = (),
    rounding: Rounding | None = None,
) -> list[tf.Tensor]:
    """Returns an array [R,H] for each of the weights: each row times the weights of its group.

    All arrays are on one device. Rows after the last group are undefined in the results and in the
    gradient of the rows. The gradients of the weights ignore them.

    Args:
      rows_RM: the rows of all groups, one group after another.
      weights: arrays [E,M,H] of the weights of each group, in the type of the rows.
      sizes_E: int32, the number of rows of each group; together at most R.
      usual_rows: the number of rows that all groups have together in most steps; 0: all rows.
      known: the results that were saved and need no computation, and None for others.
      rounding: rounds rows, weights and the gradients of the products. Its scales of rows and of
        their gradients have one row each. Gradients of weights have unrounded factors.
    """
    usual_rows = usual_rows or known_sizes(rows_RM.shape)[0]
    known = known or [None] * len(weights)

    @custom_gradient
    def compute(rows: tf.Tensor, sizes: tf.Tensor, *weights: tf.Tensor) -> Any:
        of_rows = rounding.activation(rows, "CM") if rounding else lambda _: Factor(rows)
        of_weights = [
            rounding.weight(w, "EMH", "M") if rounding else lambda _, w=w: Factor(w)
            for w in weights
        ]
        found = [
            _product(of_rows("M"), of_weight("M"), sizes, usual_rows) if saved is None else saved
            for of_weight, saved in zip(of_weights, known, strict=True)
        ]

        def gradient(*d_found: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
            if rounding or len(weights) == 1:
                factors = [
                    rounding.gradient(d, "CH")("H") if rounding else Factor(d) for d in d_found
                ]
                d_rows = tf.add_n(
                    [
                        _product(factor, of_weight("H"), sizes, usual_rows, is_transposed=True)
                        for factor, of_weight in zip(factors, of_weights, strict=True)
                    ]
                )
            else:
                d_rows = _summed(d_found, weights, sizes, usual_rows)
            d_weights = [_weight_gradient(rows, d, sizes, usual_rows) for d in d_found]
            return d_rows, None, *d_weights

        return [tf.identity(each) for each in found], gradient

    return cast(list[tf.Tensor], compute(rows_RM, sizes_E, *weights))


def activated_product(
    hidden: Sequence[tf.Tensor],
    weights_EHM: tf.Tensor,
    sizes_E: tf.Tensor,
    activation: ActivationCall,
    usual_rows: int = 0,
    known_RM: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns [R,M]: each activated row times the weights of its group, on one device.

    Kernels for TPUs activate a tile where they multiply it.

    Args:
      hidden: the arrays [R,H] that the activation takes, with the rows of one group after another.
      weights_EHM: the weights of each group, in the type of the rows.
      sizes_E: int32, the number of rows of each group; together at most R.
      activation: the activation.
      usual_rows: as in `products`.
      known_RM: the result, if it was saved and needs no computation.
    """
    count, _ = known_sizes(hidden[0].shape)
    groups, _, outer = known_sizes(weights_EHM.shape)
    call = GroupedCall(usual_rows or count, activation=activation)

    @custom_gradient
    def compute(weights: tf.Tensor, sizes: tf.Tensor, *hidden: tf.Tensor) -> Any:
        shares = _shares(call, count, groups)
        product = known_RM
        if product is None:
            result = tf.TensorSpec([count, outer], weights.dtype)
            (product,) = ACTIVATED.mark(call, [weights, sizes, *hidden], [result], *shares)

        def gradient(d_product: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
            results = [tf.TensorSpec(hidden[0].shape, weights.dtype)] * (len(hidden) + 1)
            transposed = msgspec.structs.replace(call, is_transposed=True)
            operands = [d_product, weights, sizes, *hidden]
            *d_hidden, activated = ACTIVATED_GRADIENT.mark(transposed, operands, results, *shares)
            d_weights = _weight_gradient(activated, d_product, sizes, call.usual_rows)
            return d_weights, None, *d_hidden

        return tf.identity(product), gradient

    return cast(tf.Tensor, compute(weights_EHM, sizes_E, *hidden))


def _summed(
    rows: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], sizes_E: tf.Tensor, usual_rows: int
) -> tf.Tensor:
    """Returns the sum [R,M] of the products of rows [R,H] with weights [E,M,H], transposed."""
    (count, _), (groups, outer, _) = map(known_sizes, (rows[0].shape, weights[0].shape))
    call = GroupedCall(usual_rows, is_transposed=True)
    result = tf.TensorSpec([count, outer], rows[0].dtype)
    shares = _shares(call, count, groups)
    (product,) = SUMMED.mark(call, [sizes_E, *rows, *weights], [result], *shares)
    return product


def _product(
    rows: Factor,
    weights: Factor,
    sizes_E: tf.Tensor,
    usual_rows: int,
    is_transposed: bool = False,
) -> tf.Tensor:
    """Returns [R,H]: rows [R,M] times weights [E,M,H], or [E,H,M] if they are transposed."""
    count = known_sizes(rows.values.shape)[0]
    groups, *columns = known_sizes(weights.values.shape)
    result = tf.TensorSpec([count, columns[0 if is_transposed else 1]], rows.values.dtype)
    call = GroupedCall(usual_rows, is_transposed)
    operands, scales = [rows.values, weights.values], []
    if rows.blocks and weights.blocks and _module(platform_in_use()).HAS_BLOCKS:
        operands = [rows.blocks.values, weights.blocks.values]
        scales = [rows.blocks.scales, weights.blocks.scales]
        dtypes = (rows.blocks.dtype, weights.blocks.dtype)
        call = GroupedCall(usual_rows, True, dtypes, rows.blocks.size)
    elif rows.scale is not None and weights.scale is not None:
        scales = [rows.scale, weights.scale]
        call = GroupedCall(usual_rows, True, (rows.dtype, weights.dtype))
    if scales and not is_transposed:
        # Tensor cores read factors of 8 bits along the dimension that is summed.
        operands[1], scales[1] = map(tf.linalg.matrix_transpose, (operands[1], scales[1]))
    if scales and not call.block:
        scales[1] = tf.reshape(scales[1], [groups, 1, result.shape[1]])
    share, read_share = _shares(call, count, groups)
    operands = [*operands, sizes_E, *scales]
    (product,) = FORWARD.mark(call, operands, [result], share, read_share)
    return product


def _weight_gradient(
    rows_RM: tf.Tensor, d_products_RH: tf.Tensor, sizes_E: tf.Tensor, usual_rows: int
) -> tf.Tensor:
    """Returns the gradient [E,M,H] of the weights."""
    (groups,), (count, inner) = known_sizes(sizes_E.shape), known_sizes(rows_RM.shape)
    result = tf.TensorSpec([groups, inner, d_products_RH.shape[1]], rows_RM.dtype)
    call = GroupedCall(usual_rows)
    operands = [rows_RM, d_products_RH, sizes_E]
    (gradient,) = WEIGHT_GRADIENT.mark(call, operands, [result], _shares(call, count, groups)[0])
    return gradient


def _shares(call: GroupedCall, rows: int, groups: int) -> tuple[float, float]:
    """Returns the shares of its products and of its weights that a call computes and reads."""
    computed = _module(platform_in_use()).computed_share(call, rows, groups)
    return computed, call.groups_with_rows(groups) / groups
