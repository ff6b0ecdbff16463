"""Mesh: devices arranged along named axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import UserError, names, whole_number

DEVICE_ORDERS = ("contiguous", "topology")

# In a table of letters, replaces the axes of a letter that is not split.
NO_AXES = "none"

_EXPECTED = "expected axes with their sizes, such as data=4,model=2"


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Named axes over devices.

    Attributes:
      axes: (name, size) pairs. The product of the sizes is the number of devices. Neighbors along
        the last axis are neighbors in the list of devices.
      device_order: "contiguous" keeps the order of the list of devices. "topology" makes each axis
        a ring or torus of the interconnect, if it is known (TPU).

    Raises:
      UserError: A name is repeated or not an identifier, a size is not positive, or the device
        order is unknown. The message names `mesh`.
    """

    axes: tuple[tuple[str, int], ...]
    device_order: str = "contiguous"

    def __post_init__(self):
        for name, size in self.axes:
            if not name.isidentifier() or name == NO_AXES:
                raise UserError(f"`mesh={self}`: {name!r} cannot name an axis; {_EXPECTED}")
            if self.names.count(name) > 1:
                raise UserError(f"`mesh={self}`: axis {name!r} is repeated")
            if size < 1:
                raise UserError(f"`mesh={self}`: axis {name!r} has size {size}; {_EXPECTED}")
        if not self.axes:
            raise UserError(f"`mesh` is empty; {_EXPECTED}")
        order = self.device_order
        names.check(order, DEVICE_ORDERS, f"Mesh {self}: unknown device order {order!r}")

    @classmethod
    def parse(cls, text: str, device_order: str = "contiguous") -> Mesh:
        """Returns the mesh that a text such as "data=4,model=2" describes.

        Raises:
          UserError: The text does not describe a mesh. The message names `mesh`.
        """
        axes = []
        for part in text.split(",") if text.strip() else ():
            name, _, size = (piece.strip() for piece in part.partition("="))
            number = whole_number(size)
            if not name or number is None:
                raise UserError(f"`mesh={text}`: {part.strip()!r}; {_EXPECTED}")
            axes.append((name, number))
        return cls(tuple(axes), device_order)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, in order."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes' sizes, in order."""
        return tuple(size for _, size in self.axes)

    @property
    def ids(self) -> np.ndarray:
        """XLA's partition ids, int64 in the shape of the mesh, row-major."""
        return np.arange(self.size).reshape(self.shape)

    def axis_size(self, name: str) -> int:
        """Returns the size of one axis.

        Raises:
          UserError: There is no such axis. The message names the nearest one.
        """
        if name not in self.names:
            raise UserError(
                f"`mesh={self}` has no axis {name!r}. {names.nearest(name, self.names)}"
            )
        return dict(self.axes)[name]

    def along(self, axes: Iterable[str]) -> Mesh:
        """Returns the mesh of the devices along some axes; the other axes have size 1."""
        kept = set(axes)
        sizes = tuple((name, size if name in kept else 1) for name, size in self.axes)
        return dataclasses.replace(self, axes=sizes)

    def across_slices(self, slices: int) -> tuple[int, ...]:
        """Returns the part of each axis's size that crosses slices.

        Devices are listed slice by slice, so the leading axes cross slices. Over 4 slices, the axes
        of data=16,model=4 give (4, 1): `data` joins 4 slices, and 4 devices within each of them.

        Args:
          slices: number of TPU slices of equal size.

        Raises:
          UserError: The slices do not divide the leading axes. The message names `mesh`.
        """
        left, parts = slices, []
        for size in self.shape:
            part = math.gcd(left, size)
            if part < min(left, size):
                raise UserError(
                    f"`mesh={self}`: the leading axes cannot be divided over {slices} slices; "
                    f"expected a first axis whose size is a multiple of {slices}, such as "
                    f"{self.names[0]}={slices}"
                )
            parts.append(part)
            left //= part
        return tuple(parts)

    def parts(self, axes: Iterable[str]) -> int:
        """Returns the number of parts of a dimension that is split over axes.

        Raises:
          UserError: There is no such axis. The message names the nearest one.
        """
        return math.prod(self.axis_size(axis) for axis in axes)

    def check_devices(self, count: int) -> None:
        """Checks the number of devices.

        Raises:
          UserError: The product of the axes is not `count`. The message names `mesh`.
        """
        if self.size != count:
            product = " x ".join(str(size) for size in self.shape)
            raise UserError(
                f"`mesh={self}` needs {self.size} devices ({product}), but there are {count}"
            )

    def arrange(self, devices: Sequence[Any]) -> np.ndarray:
        """Returns jax devices as an object array in the shape of the mesh, in `device_order`.

        Raises:
          UserError: The number of devices differs. The message names `mesh`.
        """
        self.check_devices(len(devices))
        if self.device_order == "topology":
            from jax.experimental import mesh_utils

            return mesh_utils.create_device_mesh(
                self.shape, devices=list(devices), allow_split_physical_axes=True
            )
        arranged = np.empty(self.size, object)
        arranged[:] = devices
        return arranged.reshape(self.shape)
