"""Parses the shardings of tensors into mesh axes, for drawing."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Protocol

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.sharding.sharding_tables import REPLICATED

# Two notations: `E->data; H->model` as in strategies, and `E over data (8), H over model (2)`.
_ARROW = re.compile(r"[;,+\s]+")
_OVER = re.compile(r"(\w) over ([\w]+(?: and [\w]+)*) \([\d x]+\)")
_REPLICATED = ("", "none", REPLICATED)


class ShardedTensor(Protocol):
    """A tensor with letters for its dimensions, and its sharding as text."""

    @property
    def layout(self) -> str: ...

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def split(self) -> str: ...


def describe(mesh: str, devices: int, tensors: Sequence[ShardedTensor]) -> dict[str, object]:
    """Returns the mesh and the sharding of each tensor.

    Args:
      mesh: axes and sizes, such as `data=4,model=2`; "" for one axis of all devices.
      devices: number of devices.
      tensors: the tensors.

    Returns:
      "axes": (name, size) of each mesh axis.
      "splits": for each tensor, the axes of each dimension, major axis first; or, if the sharding
        cannot be drawn, the reason as text.

    Raises:
      UserError: names the mesh if it does not have this number of devices.
    """
    axes = parse_mesh(mesh, devices)
    sizes = dict(axes)
    return {"axes": axes, "splits": [_dimensions(row, sizes) for row in tensors]}


def parse_mesh(mesh: str, devices: int) -> list[tuple[str, int]]:
    """Returns (name, size) of each axis in `data=4,model=2`.

    An empty mesh is one axis of all devices.
    """
    pairs = [part.partition("=") for part in mesh.split(",") if part.strip()]
    axes = [(name.strip(), int(size)) for name, _, size in pairs if size.strip().isdigit()]
    if not axes or len(axes) != len(pairs) or math.prod(size for _, size in axes) != devices:
        if mesh.strip():
            raise UserError(
                f"mesh {mesh!r} does not have {devices} devices; "
                "expected axes and sizes such as data=4,model=2"
            )
        return [("devices", devices)]
    return axes


def parse(text: str, axes: dict[str, int]) -> dict[str, list[str]]:
    """Returns the axes that each letter is split over.

    Args:
      text: a sharding such as `E->data; H->model` or `E over data (8)`.
      axes: size of each mesh axis.

    Raises:
      UserError: if the text is in neither notation or names an unknown axis.
    """
    if text.strip() in _REPLICATED:
        return {}
    if "->" in text:
        return _parse_arrows(text, axes)
    found = {letter: names.split(" and ") for letter, names in _OVER.findall(text)}
    unknown = [name for names in found.values() for name in names if name not in axes]
    if not found or unknown:
        raise UserError(f"split {text!r} on axes {', '.join(axes)} cannot be read")
    return found


def _parse_arrows(text: str, axes: dict[str, int]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    waiting: list[str] = []
    current: list[str] = []
    for token in filter(None, _ARROW.split(text.replace(" ->", "->").replace("-> ", "->"))):
        letter, arrow, axis = token.partition("->")
        if arrow:
            current = [letter for letter in (*waiting, letter) if letter]
            waiting = []
            found.update({letter: [] for letter in current})
        elif not (current and token in axes):
            waiting.append(token)
            continue
        axis = axis if arrow else token
        if axis == "none":
            continue
        if axis not in axes:
            raise UserError(f"split {text!r} names axis {axis!r}; the axes are {', '.join(axes)}")
        for name in current:
            found[name].append(axis)
    if waiting:
        raise UserError(f"split {text!r} on axes {', '.join(axes)} cannot be read")
    return found


def _dimensions(row: ShardedTensor, sizes: dict[str, int]) -> list[list[str]] | str:
    """Returns the axes of each dimension, or why the sharding cannot be drawn."""
    layout, shape = row.layout, row.shape
    try:
        by_letter = parse(row.split, sizes)
    except ValueError as error:
        return str(error)
    if not by_letter:
        return [[] for _ in shape]
    if len(layout) != len(shape) or not set(by_letter) <= set(layout):
        return f"split {row.split!r} does not fit layout {layout!r} of {len(shape)} dimensions"
    return [by_letter.get(letter, []) for letter in layout]
