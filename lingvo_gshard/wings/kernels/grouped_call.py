"""GroupedCall: the static arguments of a grouped product."""

from __future__ import annotations

from typing import Any

import msgspec

from lingvo_gshard.wings.kernels.activation_call import ActivationCall


class GroupedCall(msgspec.Struct, frozen=True):
    """The static arguments of a grouped product.

    Attributes:
      usual_rows: the number of rows that all groups have together in most steps. Arrays may have
        room for more. Tiles are chosen for it.
      is_transposed: whether the weights are [E,H,M], as in the gradient of the rows.
      dtypes: types of 8 bits that have all values of the rows and of the weights. The product is
        then multiplied by scales of the rows, float32 [R,1], and of the columns, float32 [E,1,H].
        Empty for products in the type of the rows, without scales.
      block: size of the blocks that have scales instead, along M in rows, and along M and H in
        weights: float32 [R,M/block] and [E,H/block,M/block]; 0 for none.
      activation: of the kernels of activated products: what computes the rows of hidden arrays.
    """

    usual_rows: int
    is_transposed: bool = False
    dtypes: tuple[str, ...] = ()
    block: int = 0
    activation: ActivationCall | None = None

    def factors(self, rows: Any, weights: Any) -> tuple[Any, Any]:
        """Returns the rows and weights, arrays of jax, in the types that the kernel multiplies."""
        if not self.dtypes:
            return rows, weights
        return rows.astype(self.dtypes[0]), weights.astype(self.dtypes[1])

    def rows_of_group(self, groups: int) -> int:
        """Returns the rows of a group if all groups have equally many."""
        return -(-self.usual_rows // groups)

    def groups_with_rows(self, groups: int) -> int:
        """Returns the largest number of groups that have rows in most steps."""
        return min(groups, self.usual_rows)


def largest_power(limit: int, least: int, most: int) -> int:
    """Returns the largest power of two up to a limit, within the range from `least` to `most`."""
    return min(max(1 << max(limit.bit_length() - 1, 0), least), most)
