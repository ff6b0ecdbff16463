"""Mesh: named axes over devices, the one thing that strategies and layouts are mapped to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.config import names

DEVICE_ORDERS = ("contiguous", "topology")

# What a table of letters says in place of axes: not split.
NO_AXES = "none"

_EXPECTED = "expected axes with their sizes, such as data=4,model=2"


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Axes, each a name and a size, whose product is the number of devices.

    axes: (name, size) pairs; neighbors along the last axis are neighbors in the list of devices.
    device_order: 'contiguous' puts devices in as they are listed; 'topology' so that each axis is a
        ring or torus of the interconnect, where it is known (TPU).

    Raises ValueError naming --mesh if a name is no identifier or stands twice, a size is not
    positive, or the device order is unknown.
    """

    axes: tuple[tuple[str, int], ...]
    device_order: str = "contiguous"

    def __post_init__(self):
        for name, size in self.axes:
            if not name.isidentifier() or name == NO_AXES:
                raise ValueError(f"--mesh={self}: {name!r} cannot name an axis; {_EXPECTED}")
            if self.names.count(name) > 1:
                raise ValueError(f"--mesh={self}: axis {name!r} stands more than once")
            if size < 1:
                raise ValueError(f"--mesh={self}: axis {name!r} has size {size}; {_EXPECTED}")
        if not self.axes:
            raise ValueError(f"--mesh is empty; {_EXPECTED}")
        if self.device_order not in DEVICE_ORDERS:
            raise ValueError(
                f"Mesh {self}: unknown device order {self.device_order!r}. "
                f"{names.nearest(self.device_order, DEVICE_ORDERS)}"
            )

    @classmethod
    def parse(cls, text: str, device_order: str = "contiguous") -> Mesh:
        """Returns the mesh written as `data=4,model=2`; ValueError naming --mesh if it is not."""
        axes = []
        for part in text.split(",") if text.strip() else ():
            name, _, size = (piece.strip() for piece in part.partition("="))
            if not (name and size.isascii() and size.isdigit()):
                raise ValueError(f"--mesh={text}: {part.strip()!r}; {_EXPECTED}")
            axes.append((name, int(size)))
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
        """XLA's partition ids in the mesh's shape: int64, row-major."""
        return np.arange(self.size).reshape(self.shape)

    def axis_size(self, name: str) -> int:
        """Returns the size of one axis; ValueError with the nearest name if there is none."""
        if name not in self.names:
            raise ValueError(
                f"--mesh={self} has no axis {name!r}. {names.nearest(name, self.names)}"
            )
        return dict(self.axes)[name]

    def check_devices(self, count: int) -> None:
        """Raises ValueError naming --mesh if the axes do not multiply to `count` devices."""
        if self.size != count:
            product = " x ".join(str(size) for size in self.shape)
            raise ValueError(
                f"--mesh={self} needs {self.size} devices ({product}), but there are {count}"
            )

    def arrange(self, devices: Sequence[Any]) -> np.ndarray:
        """Returns jax devices as an object array of the mesh's shape, in `device_order`.

        Raises ValueError naming --mesh if their number is another.
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
