"""Functions of a model's weights, bound to the weights that a runtime holds.

Decoding needs only this part of a runtime; `training/run/runtime_protocol.py` states the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap

# Maps (theta, ids) to a tensor.
WeightsFunction: TypeAlias = "Callable[[NestedMap, tf.Tensor], tf.Tensor]"
# Maps token ids to the function's result. It is compiled once for each shape of the ids.
BoundFunction: TypeAlias = "Callable[[np.ndarray], np.ndarray]"


class WeightsHolder(Protocol):
    """Protocol of objects that hold weights and compile functions of them."""

    def bind_weights(self, function: WeightsFunction) -> BoundFunction:
        """Returns `function` with the current weights as its first argument."""
        ...
