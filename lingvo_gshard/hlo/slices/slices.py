"""The TPU slices that a program runs on, and the devices of each."""

from __future__ import annotations

import dataclasses
import functools

from lingvo_gshard.hlo.replica_groups import Groups
from lingvo_gshard.sharding.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Slices:
    """The TPU slices that a program runs on. A mesh lists its devices slice by slice.

    Attributes:
      count: number of slices.
      is_split: whether the compiler made the program of one slice. Device ids then count within
        the slice, and the runtime of the data-center network joins the slices.
    """

    count: int = 1
    is_split: bool = False

    def positions(self, groups: Groups, mesh: Mesh) -> Groups:
        """Returns the groups of all slices by positions in the mesh.

        Args:
          groups: groups or pairs of device ids of the program; () for a single group of all.
          mesh: the mesh of all slices.
        """
        if not self.is_split:
            return groups
        return _in_every_slice(groups, self.count, mesh.size // self.count)

    def spanned(self, groups: Groups, mesh: Mesh) -> int:
        """Returns the number of slices that a group spans.

        Args:
          groups: groups or pairs of positions in the mesh; () for a single group of all.
          mesh: the mesh of all slices.
        """
        size = mesh.size // self.count
        return max((len({i // size for i in group}) for group in groups), default=self.count)


ONE_SLICE = Slices()


@functools.lru_cache(maxsize=2**12)
def _in_every_slice(groups: Groups, count: int, size: int) -> Groups:
    groups = groups or (tuple(range(size)),)
    return tuple(
        tuple(i + index * size for i in group) for index in range(count) for group in groups
    )
