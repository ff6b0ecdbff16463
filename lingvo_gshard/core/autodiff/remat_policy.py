"""Rematerialization policies: what of a forward pass is kept, and what is computed again.

A policy names the matrix products whose results are kept; the rest between a segment's input and
its output is computed again in the backward pass (Chen et al. 2016, arXiv 1604.06174).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import tensorflow as tf

from lingvo_gshard.core import letters
from lingvo_gshard.core.config import names

Keeps = Callable[[str, str, str], bool]

NONE = "none"


def _is_with_weight(left: str, right: str, output: str) -> bool:
    """Whether one operand is a weight: no dimension of both is a batch's."""
    return not (set(left) & set(right) & set(output)) - set(letters.WEIGHT_BATCH)


POLICIES: dict[str, Keeps] = {
    NONE: lambda left, right, output: True,
    "full": lambda left, right, output: False,
    "products": _is_with_weight,
    "products_but_hidden": lambda left, right, output: (
        _is_with_weight(left, right, output) and not set(letters.HIDDEN) & set(output)
    ),
}


def check(policy: str, where: str) -> None:
    """Raises ValueError naming `where`, a Params path, if there is no such policy."""
    if policy not in POLICIES:
        raise ValueError(
            f"{where}: unknown rematerialization policy {policy!r}. "
            f"{names.nearest(policy, POLICIES)}"
        )


class Kept:
    """The products of one segment that a policy keeps: layouts and results, in order."""

    def __init__(self, policy: str):
        self._keeps = POLICIES[policy]
        self.layouts: list[str] = []
        self.results: list[tf.Tensor] = []
        self._replayed: Iterator[tf.Tensor] | None = None

    def take(self, left: str, right: str, output: str) -> tf.Tensor | None:
        """Returns the kept result of the product that is now to be computed, if there is one."""
        if self._replayed is None or not self._keeps(left, right, output):
            return None
        return next(self._replayed)

    def add(self, left: str, right: str, output: str, result: tf.Tensor) -> None:
        """Keeps a product's result if the policy says so."""
        if self._replayed is None and self._keeps(left, right, output):
            self.layouts.append(output)
            self.results.append(result)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Within it, products are computed, and kept here."""
        token = _kept.set(self)
        try:
            yield
        finally:
            _kept.reset(token)

    @contextlib.contextmanager
    def replayed(self, results: list[tf.Tensor]) -> Iterator[None]:
        """Within it, products that were kept have these results, in the order of recording."""
        self._replayed = iter(results)
        token = _kept.set(self)
        try:
            yield
        finally:
            _kept.reset(token)
            self._replayed = None


_kept: contextvars.ContextVar[Kept | None] = contextvars.ContextVar("kept", default=None)


def kept() -> Kept | None:
    """Returns where the products of the segment under way are kept, or None outside of any."""
    return _kept.get()
