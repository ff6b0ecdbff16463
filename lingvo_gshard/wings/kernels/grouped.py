"""Grouped products: rows sorted by group, each multiplied by the weights of its group."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, cast

from lingvo_gshard.core import custom_gradient, known_sizes, tf
from lingvo_gshard.sharding import Blocks, Factor, FactorFor, Rounding, hardware_of, platform_in_use
from lingvo_gshard.wings.kernels import grouped_rows, grouped_tpu, grouped_triton
from lingvo_gshard.wings.kernels.activation_call import ActivationCall
from lingvo_gshard.wings.kernels.grouped_call import GroupedCall
from lingvo_gshard.wings.kernels.grouped_rows import RowsCall
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
# Kernels for TPUs activate rows where they multiply them, and those for GPUs before they do.
ACTIVATED = register("grouped_products_activated", GroupedCall, tpu=grouped_tpu.activated)
ACTIVATED_GRADIENT = register(
    "grouped_products_activated_gradient", GroupedCall, tpu=grouped_tpu.activated_gradient
)
ROWS = register("grouped_rows", RowsCall, cuda=grouped_rows.forward)
ROWS_GRADIENT = register("grouped_rows_gradient", RowsCall, cuda=grouped_rows.gradient)
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
      is_rounded: whether factors are rounded to 8 bits.
    """
    weights = tuple(known_sizes(weights_EMH.shape))
    return _module(platform).obstacle((rows, weights[1]), weights, dtype, is_rounded)


def padded_rows(platform: str, rows: int, usual_rows: int, groups: int) -> int:
    """Returns the number of rows of an array that the kernel reads without a padded copy.

    There is room for so many `rows`; `usual_rows` are as in `products`.
    """
    return _module(platform).padded_rows(GroupedCall(usual_rows), rows, groups)


# Activations with the error function, which Pallas does not lower for Triton.
_WITH_ERF = ("gelu", "geglu")


def can_activate(platform: str, activation: str, rounding: Rounding | None) -> bool:
    """Returns whether a platform's kernels compute an activation, before rounded products too."""
    if hardware_of(platform) == "cuda" and activation in _WITH_ERF:
        return False
    return rounding is None or _rounds_rows(platform, rounding)


def _rounds_rows(platform: str, rounding: Rounding) -> bool:
    return hardware_of(platform) in ROWS.bodies and rounding.row_format(False) is not None


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
        groups = _Groups(sizes, usual_rows, rounding)
        of_weights = [groups.weight(weight) for weight in weights]
        found = list(known)
        if None in known:
            factor = groups.rows([rows])
            found = [
                groups.product(factor, of_weight("M")) if saved is None else saved
                for of_weight, saved in zip(of_weights, known, strict=True)
            ]

        def gradient(*d_found: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
            factors = [groups.rows([d], is_gradient=True) for d in d_found]
            d_rows = groups.summed(factors, [of_weight("H") for of_weight in of_weights])
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
    rounding: Rounding | None = None,
) -> tf.Tensor:
    """Returns [R,M]: each activated row times the weights of its group, on one device.

    Kernels for TPUs activate a tile where they multiply it. Those for GPUs activate rows before,
    because tensor cores read their factors unchanged.

    Args:
      hidden: the arrays [R,H] that the activation takes, with the rows of one group after another.
      weights_EHM: the weights of each group, in the type of the rows.
      sizes_E: int32, the number of rows of each group; together at most R.
      known_RM: the result, if it was saved and needs no computation.
      rounding: as in `products`, if `can_activate`.
    """
    usual_rows = usual_rows or known_sizes(hidden[0].shape)[0]
    has_rows = hardware_of(platform_in_use()) in ROWS.bodies

    @custom_gradient
    def compute(weights: tf.Tensor, sizes: tf.Tensor, *hidden: tf.Tensor) -> Any:
        groups = _Groups(sizes, usual_rows, rounding)
        product, of_weight = known_RM, groups.weight(weights)
        if product is None and has_rows:
            product = groups.product(groups.rows(hidden, activation), of_weight("M"))
        elif product is None:
            product = groups.activated(weights, hidden, activation)

        def gradient(d_product: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
            if has_rows:
                factor = groups.rows([d_product], is_gradient=True)
                d_rows = groups.product(factor, of_weight("H"), is_transposed=True)
                found = groups.activation_gradient(d_rows, hidden, activation)
            else:
                found = groups.activated_gradient(d_product, weights, hidden, activation)
            *d_hidden, activated = found
            return _weight_gradient(activated, d_product, sizes, usual_rows), None, *d_hidden

        return tf.identity(product), gradient

    return cast(tf.Tensor, compute(weights_EHM, sizes_E, *hidden))


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The rows of groups on one device, and the calls of kernels for them.

    Attributes:
      sizes_E: int32, the number of rows of each group.
      usual_rows: the number of rows that all groups have together in most steps.
    """

    sizes_E: tf.Tensor
    usual_rows: int
    rounding: Rounding | None

    def weight(self, weight_EMH: tf.Tensor) -> FactorFor:
        """Returns weights as a factor, given the letters that a product sums over."""
        if self.rounding:
            return self.rounding.weight(weight_EMH, "EMH", "M")
        return lambda _: Factor(weight_EMH)

    def rows(
        self,
        arrays: Sequence[tf.Tensor],
        activation: ActivationCall | None = None,
        is_gradient: bool = False,
    ) -> Factor:
        """Returns rows as a factor. If they are activated or rounded, by a kernel if there is one.

        Args:
          arrays: the rows, or the arrays [R,H] that the activation takes.
          activation: the activation, or None.
        """
        rounding = self.rounding
        if rounding and not _rounds_rows(platform_in_use(), rounding):
            rule = rounding.gradient if is_gradient else rounding.activation
            return rule(arrays[0], "CM")("M")
        row_format = rounding.row_format(is_gradient) if rounding else None
        if row_format is None and activation is None:
            return Factor(arrays[0])
        specs, call = [tf.TensorSpec(arrays[0].shape, arrays[0].dtype)], RowsCall(activation)
        if row_format:
            call = RowsCall(activation, *row_format)
            count, columns = known_sizes(arrays[0].shape)
            specs = [
                tf.TensorSpec([count, columns], tf.as_dtype(call.dtype)),
                tf.TensorSpec([count, call.scale_count(columns)], tf.float32),
            ]
        found = ROWS.mark(call, [self.sizes_E, *arrays], specs, self._used_share(arrays[0]))
        if not row_format:
            return Factor(found[0])
        values, scales = found
        if not call.block:
            return Factor(values, scales, call.dtype)
        return Factor(values, blocks=Blocks(values, scales, call.block, call.dtype))

    def activation_gradient(
        self, d_rows_RH: tf.Tensor, hidden: Sequence[tf.Tensor], activation: ActivationCall
    ) -> list[tf.Tensor]:
        """Returns the gradient of each hidden array, and the activated rows, all [R,H]."""
        specs = [tf.TensorSpec(d_rows_RH.shape, d_rows_RH.dtype)] * (len(hidden) + 1)
        operands = [self.sizes_E, d_rows_RH, *hidden]
        share = self._used_share(d_rows_RH)
        return ROWS_GRADIENT.mark(RowsCall(activation), operands, specs, share)

    def activated(
        self, weights_EHM: tf.Tensor, hidden: Sequence[tf.Tensor], activation: ActivationCall
    ) -> tf.Tensor:
        """Returns the products [R,M] of activated rows, by one kernel."""
        (count, _), (groups, _, outer) = map(known_sizes, (hidden[0].shape, weights_EHM.shape))
        call = GroupedCall(self.usual_rows, activation=activation)
        result = tf.TensorSpec([count, outer], weights_EHM.dtype)
        operands = [weights_EHM, self.sizes_E, *hidden]
        (product,) = ACTIVATED.mark(call, operands, [result], *_shares(call, count, groups))
        return product

    def activated_gradient(
        self,
        d_product_RM: tf.Tensor,
        weights_EHM: tf.Tensor,
        hidden: Sequence[tf.Tensor],
        activation: ActivationCall,
    ) -> list[tf.Tensor]:
        """Returns the gradient of each hidden array, and the activated rows, by one kernel."""
        count, groups = known_sizes(hidden[0].shape)[0], known_sizes(weights_EHM.shape)[0]
        call = GroupedCall(self.usual_rows, is_transposed=True, activation=activation)
        results = [tf.TensorSpec(hidden[0].shape, weights_EHM.dtype)] * (len(hidden) + 1)
        operands = [d_product_RM, weights_EHM, self.sizes_E, *hidden]
        return ACTIVATED_GRADIENT.mark(call, operands, results, *_shares(call, count, groups))

    def product(self, rows: Factor, weights: Factor, is_transposed: bool = False) -> tf.Tensor:
        """Returns [R,H]: rows [R,M] times weights [E,M,H], or [E,H,M] if they are transposed."""
        call, result, (values, weight, *scales) = self._call(rows, weights, is_transposed)
        shares = _shares(call, known_sizes(result.shape)[0], known_sizes(weight.shape)[0])
        (product,) = FORWARD.mark(call, [values, weight, self.sizes_E, *scales], [result], *shares)
        return product

    def summed(self, rows: Sequence[Factor], weights: Sequence[Factor]) -> tf.Tensor:
        """Returns the sum [R,M] of the products of rows [R,H] with weights [E,M,H], transposed."""
        pairs = list(zip(rows, weights, strict=True))
        calls = [self._call(*pair, is_transposed=True) for pair in pairs]
        call, result, operands = calls[0]
        can_sum = not call.dtypes or hardware_of(platform_in_use()) in ROWS.bodies
        if len(pairs) == 1 or not can_sum:
            return tf.add_n([self.product(*pair, is_transposed=True) for pair in pairs])
        by_kind = zip(*(operands for _, _, operands in calls), strict=True)
        shares = _shares(call, known_sizes(result.shape)[0], known_sizes(operands[1].shape)[0])
        listed = [self.sizes_E, *itertools.chain.from_iterable(by_kind)]
        (product,) = SUMMED.mark(call, listed, [result], *shares)
        return product

    def _call(
        self, rows: Factor, weights: Factor, is_transposed: bool
    ) -> tuple[GroupedCall, tf.TensorSpec, list[tf.Tensor]]:
        """Returns the call of a product, its result, and its rows, weights and their scales."""
        count = known_sizes(rows.values.shape)[0]
        groups, *columns = known_sizes(weights.values.shape)
        outer = columns[0 if is_transposed else 1]
        result = tf.TensorSpec([count, outer], weights.values.dtype)
        call = GroupedCall(self.usual_rows, is_transposed)
        operands, scales = [rows.values, weights.values], []
        if rows.blocks and weights.blocks and _module(platform_in_use()).HAS_BLOCKS:
            operands = [rows.blocks.values, weights.blocks.values]
            scales = [rows.blocks.scales, weights.blocks.scales]
            dtypes = (rows.blocks.dtype, weights.blocks.dtype)
            call = GroupedCall(self.usual_rows, True, dtypes, rows.blocks.size)
        elif rows.scale is not None and weights.scale is not None:
            scales = [rows.scale, weights.scale]
            call = GroupedCall(self.usual_rows, True, (rows.dtype, weights.dtype))
        if scales and not is_transposed:
            # Tensor cores read factors of 8 bits along the dimension that is summed.
            operands[1], scales[1] = map(tf.linalg.matrix_transpose, (operands[1], scales[1]))
        if scales and not call.block:
            scales[1] = tf.reshape(scales[1], [groups, 1, outer])
        return call, result, [*operands, *scales]

    def _used_share(self, rows: tf.Tensor) -> float:
        """Returns the share of an array's rows that groups have in most steps."""
        return min(self.usual_rows / known_sizes(rows.shape)[0], 1.0)


def _weight_gradient(
    rows_RM: tf.Tensor, d_products_RH: tf.Tensor, sizes_E: tf.Tensor, usual_rows: int
) -> tf.Tensor:
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
