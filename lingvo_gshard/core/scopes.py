"""Names of operations beside the paths of layers: readers of compiled programs look for them.

A compiled program does not state the number of iterations of a loop with a computed end. The layer
that makes the loop knows the usual number, for example with balanced loads, and puts that number
into the loop's name (`loop_name`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Operations that compute the loss from the logits.
LOSS_SCOPE = "loss"
# Encloses the name scopes of the weights, so that profiles attribute updates to the optimizer.
OPTIMIZER_SCOPE = "optimizer"
# Operations that move tokens to experts and back, inside the layer's scope.
DISPATCH_SCOPE, COMBINE_SCOPE = "dispatch", "combine"
# Operations that the backward pass computes once more.
RECOMPUTED_SCOPE = "rematerialized"

_LOOP = re.compile(r"expected_(\d+)_trips")


def loop_name(trips: int) -> str:
    """Returns the name of a loop that usually has this many iterations, for `tf.while_loop`."""
    return f"expected_{trips}_trips"


def trips_of(name: str) -> int | None:
    """Returns the usual iterations of a loop by the name of its operation; None if it has none."""
    found = _LOOP.findall(name)
    return int(found[-1]) if found else None


_FUSED = re.compile(r"fused_([a-z_]+)_share_(\d+\.\d+)(?:_read_(\d\.\d+))?")


class FusedCall(NamedTuple):
    """The call of a kernel, found by the name of an operation in its body.

    Attributes:
      share: the share of its products that the kernel computes.
      read_share: the share of its weights that the kernel reads.
    """

    kernel: str
    share: float
    read_share: float

    @property
    def scope(self) -> str:
        """The name scope of the operations of the call."""
        read = f"_read_{self.read_share:.4f}" if self.read_share < 1 else ""
        return f"fused_{self.kernel}_share_{self.share:.4f}{read}"

    @classmethod
    def of(cls, op_name: str) -> FusedCall | None:
        """Returns the call whose body has this operation of HLO; None if no kernel has it."""
        found = _FUSED.search(op_name)
        return cls(found[1], float(found[2]), float(found[3] or 1)) if found else None
