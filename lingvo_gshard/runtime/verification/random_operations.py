"""Finds random operations that draw without a key of the step, and whose numbers follow no seed."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.tracing.graph_lines import line_of_operation
from lingvo_gshard.runtime.verification.sources import REGION_END, sources

# Types of stateful operations, such as RandomUniformInt, as they begin.
_STATEFUL = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "Random",
    "StatefulRandom",
    "StatefulStandardNormal",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "TruncatedNormal",
)
_STATELESS = ("StatelessMultinomial", "StatelessRandom", "StatelessTruncatedNormal")
# Operations on keys: what they are computed from, not they, draws numbers.
_KEYS = ("StatelessRandomGetAlg", "StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg")


class RandomOperation(msgspec.Struct, frozen=True):
    """A random operation that ignores the keys of the step.

    Attributes:
      kind: TensorFlow's type of the operation, such as "RandomUniform".
      is_stateless: whether it draws from a seed of its own; otherwise from a hidden generator.
      source: the line that draws; empty if it is unknown.
    """

    kind: str
    is_stateless: bool
    source: str

    def __str__(self) -> str:
        how = "a fixed seed of its own" if self.is_stateless else "a generator of its own"
        at = f" at {self.source}" if self.source else ""
        return f"{self.kind}{at} draws from {how}"


def nearest_random_operation(
    tensor: tf.Tensor, equal: Collection[tf.Operation] = ()
) -> RandomOperation | None:
    """Returns the nearest random operation without a key that a tensor is computed from.

    A key of the step is a function of one of its inputs. A fixed seed gives the same numbers on all
    meshes, but in a manual region each device draws them for its own shard.

    Args:
      tensor: tensor of a traced graph.
      equal: operations whose results are equal; what is before them is not looked at.
    """
    in_region = False
    for operation in sources(tensor.op, equal):
        in_region |= operation.type == REGION_END
        if operation.type.startswith(_STATEFUL):
            return RandomOperation(operation.type, False, line_of_operation(operation))
        is_stateless = operation.type.startswith(_STATELESS) and operation.type not in _KEYS
        if is_stateless and in_region:
            # After the shape come the seed, or the key and the counter.
            seeds = [x for x in operation.inputs[1:3] if x.dtype.is_integer]
            if not any(each.type == "Placeholder" for x in seeds for each in sources(x.op)):
                return RandomOperation(operation.type, True, line_of_operation(operation))
    return None
