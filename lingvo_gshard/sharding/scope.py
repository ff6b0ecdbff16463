"""The sharding that holds while a function is traced."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from lingvo_gshard.core.scopes import Scope

if TYPE_CHECKING:
    from lingvo_gshard.sharding.partitioning import Partitioning
    from lingvo_gshard.sharding.recording import Recorded


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How the tensors of the function being traced are split.

    Attributes:
      partitioning: The partitioning that annotations follow, or None if they have no effect.
      manual_partitioning: The partitioning of the manual region being traced, None outside.
      recorded: Collects the products and annotations of the function, or None.
    """

    partitioning: Partitioning | None = None
    manual_partitioning: Partitioning | None = None
    recorded: Recorded | None = None


_scope = Scope("sharding", Sharding())


def current() -> Sharding:
    """Returns the sharding that holds now."""
    return _scope.get()


def override(**fields: Any) -> contextlib.AbstractContextManager[Sharding]:
    """Changes fields of the current sharding inside a `with` block."""
    return _scope.use(dataclasses.replace(current(), **fields))
