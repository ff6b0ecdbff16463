"""Rematerialization (remat) policies: which products of a forward pass the backward pass reuses.

A policy names the matrix products whose results are saved. The backward pass recomputes everything
else between the inputs and the output of a remat unit (Chen et al. 2016, arXiv 1604.06174).
An offloaded policy keeps the saved tensors and the input of a unit in the memory of the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from lingvo_gshard.core import letters
from lingvo_gshard.core.config import names
from lingvo_gshard.core.lazy import tf

# Returns whether to save the product of layouts (left, right, output). Rows that devices send each
# other for experts have no right layout.
SavePolicy = Callable[[str, str, str], bool]

NONE = "none"
# Ends the name of a policy whose saved tensors are kept in host memory between the passes.
_OFFLOADED = "_offloaded"


def _has_weight_operand(left: str, right: str, output: str) -> bool:
    """Returns whether one operand is a weight: the product is not batched, except over experts."""
    return not (set(left) & set(right) & set(output)) - set(letters.WEIGHT_BATCH)


ON_DEVICE: dict[str, SavePolicy] = {
    NONE: lambda left, right, output: True,
    "full": lambda left, right, output: False,
    "exchanges": lambda left, right, output: not right,
    "products": _has_weight_operand,
    "products_but_hidden": lambda left, right, output: (
        _has_weight_operand(left, right, output) and not set(letters.HIDDEN) & set(output)
    ),
}
# Without a policy of its own a unit saves many small tensors, which are not worth a transfer each.
POLICIES = ON_DEVICE | {
    f"{name}{_OFFLOADED}": policy for name, policy in ON_DEVICE.items() if name != NONE
}


def is_offloaded(policy: str) -> bool:
    """Returns whether a policy keeps the tensors that it saves in host memory."""
    return policy.endswith(_OFFLOADED)


def on_device(policy: str) -> str:
    """Returns the policy that keeps the same tensors on the device."""
    return policy.removesuffix(_OFFLOADED)


def check(policy: str, where: str) -> None:
    """Checks that a policy exists.

    Args:
      where: Params path that sets it, for the message.

    Raises:
      UserError: There is no such policy.
    """
    names.check(policy, POLICIES, f"{where}: unknown rematerialization policy {policy!r}")


class SavedProducts:
    """The matrix products of one remat unit that a policy saves.

    Attributes:
      layouts: Layouts of the saved results, in the order of computation.
      results: The saved results, in the order of computation.
      restored: The results that replace products while restoring, in the order of computation.
    """

    def __init__(self, policy: str):
        self._is_saved = POLICIES[policy]
        self.layouts: list[str] = []
        self.results: list[tf.Tensor] = []
        self.restored: Sequence[tf.Tensor] = ()
        self._next: Iterator[tf.Tensor] | None = None

    def selects(self, left: str, right: str, output: str) -> bool:
        """Returns whether the policy saves the result of a product."""
        return self._is_saved(left, right, output)

    def save(self, left: str, right: str, output: str, result: tf.Tensor) -> None:
        """Saves the result of a product if the policy selects it. Has no effect while restoring."""
        if self._next is None and self.selects(left, right, output):
            self.layouts.append(output)
            self.results.append(result)

    def restore(self, left: str, right: str, output: str) -> tf.Tensor | None:
        """Returns the saved result of the next product, or None if the product was not saved."""
        if self._next is None or not self.selects(left, right, output):
            return None
        return next(self._next)

    @contextlib.contextmanager
    def giving(self, results: Sequence[tf.Tensor]) -> Iterator[None]:
        """Has `restore` return results that were saved before, in order, inside a `with` block."""
        self.restored, self._next = results, iter(results)
        try:
            yield
        finally:
            self.restored, self._next = (), None
