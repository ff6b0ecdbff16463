"""The values that a hyperparameter accepts: its type, and its range or choices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import numpy as np

from lingvo_gshard.core.errors import UserError

# Compiled steps count in 32 bits, and no dimension of a tensor is larger.
_LARGEST_INT = 2**31 - 1
# Types of values by the type of the default. To Python, a bool is an int.
_KINDS = {bool: (bool, np.bool_), int: (int, np.integer), float: (int, float, np.number), str: str}
_NOUNS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}


@dataclasses.dataclass(frozen=True)
class Constraint:
    """The accepted values of one hyperparameter. They must also have the type of its default.

    Attributes:
      above: All numbers are larger than this.
      below: All numbers are smaller than this.
      choices: All strings that are accepted; empty: any string.
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: Collection[str] = ()

    def converted(self, value: Any, default: Any) -> Any:
        """Returns a value as the type of the default: a float for 1 if the default is 1.0.

        A default that is no number, bool or string leaves the type open.

        Raises:
          UserError: The value has another type or is out of range. The message is a clause such
            as "expected 1 or more".
        """
        if type(default) not in _KINDS:
            return value
        is_suited = isinstance(default, bool) or not isinstance(value, bool)
        if not (is_suited and isinstance(value, _KINDS[type(default)])):
            raise UserError(f"expected {self.describe(default)}")
        if isinstance(default, (bool, int, float)):
            value = type(default)(value)
        if isinstance(value, int) and abs(value) > _LARGEST_INT:
            raise UserError(f"expected {self.describe(default)} that fits into 32 bits")
        if not self._holds(value):
            raise UserError(f"expected {self.describe(default)}")
        return value

    def describe(self, default: Any) -> str:
        """Returns the accepted values in words, such as "a whole number of 1 or more"."""
        if self.choices:
            *others, last = map(repr, self.choices)
            return f"{', '.join(others)} or {last}"
        return f"{_NOUNS[type(default)]} {self.range()}".strip()

    def range(self) -> str:
        """Returns the range in words, such as "of 1 or more"; '' if it has no bound."""
        low, high = self.minimum, self.maximum
        if low is not None and high is not None:
            return f"from {low:,} to {high:,}"
        words = []
        if low is not None:
            words.append(f"of {low:,} or more")
        if self.above is not None:
            words.append(f"above {self.above:,}")
        if high is not None:
            words.append(f"of {high:,} at most")
        if self.below is not None:
            words.append(f"below {self.below:,}")
        return " and ".join(words)

    def _holds(self, value: Any) -> bool:
        if isinstance(value, str):
            return not self.choices or value in self.choices
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        if not math.isfinite(value):
            return False
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )
