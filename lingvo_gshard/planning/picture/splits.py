"""How a plan's tensors lie on its mesh, read from the plan's words, for drawing."""

from __future__ import annotations

import math
import re
from typing import Any

# Two ways to say it: `E->data; H->model` as in strategies, `E over data (8), H over model (2)`.
_ARROW = re.compile(r"[;,+\s]+")
_OVER = re.compile(r"(\w) over ([\w]+(?: and [\w]+)*) \([\d x]+\)")
_WHOLE = ("", "whole", "none", "replicated")


def describe(plan: dict[str, Any]) -> dict[str, Any]:
    """Returns {"axes": [(name, size)], "splits": for each tensor, the axes of each dimension}.

    The first axis of a dimension is the major one. In place of a split that cannot be drawn stands
    the reason, as text. Raises ValueError naming the mesh if it has not the plan's devices.
    """
    axes = axes_of(plan["mesh"], plan["devices"])
    sizes = dict(axes)
    return {"axes": axes, "splits": [_dimensions(row, sizes) for row in plan["tensors"]]}


def axes_of(mesh: str, devices: int) -> list[tuple[str, int]]:
    """Returns (name, size) of the axes in `data=4,model=2`; of no mesh, all devices as one axis."""
    pairs = [part.partition("=") for part in mesh.split(",") if part.strip()]
    axes = [(name.strip(), int(size)) for name, _, size in pairs if size.strip().isdigit()]
    if len(axes) != len(pairs) or math.prod(size for _, size in axes) != devices:
        if mesh.strip():
            raise ValueError(
                f"Plan: mesh {mesh!r} does not have {devices} devices; "
                "expected axes with their sizes, such as data=4,model=2"
            )
        return [("devices", devices)]
    return axes


def parse(text: str, axes: dict[str, int]) -> dict[str, list[str]]:
    """Returns the axes that each letter is split over.

    Raises ValueError if neither `E->data; H->model` nor `E over data (8)` can be read in the text.
    """
    if text.strip() in _WHOLE:
        return {}
    if "->" in text:
        return _parse_arrows(text, axes)
    found = {letter: names.split(" and ") for letter, names in _OVER.findall(text)}
    unknown = [name for names in found.values() for name in names if name not in axes]
    if not found or unknown:
        raise ValueError(f"split {text!r} on axes {', '.join(axes)} cannot be read")
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
            raise ValueError(f"split {text!r} names axis {axis!r}; there are {', '.join(axes)}")
        for name in current:
            found[name].append(axis)
    if waiting:
        raise ValueError(f"split {text!r} on axes {', '.join(axes)} cannot be read")
    return found


def _dimensions(row: dict[str, Any], sizes: dict[str, int]) -> list[list[str]] | str:
    layout, shape = row.get("layout") or "", row.get("shape") or []
    try:
        by_letter = parse(row.get("split") or "", sizes)
    except ValueError as error:
        return str(error)
    if not by_letter:
        return [[] for _ in shape]
    if len(layout) != len(shape) or not set(by_letter) <= set(layout):
        return f"split {row['split']!r} does not fit layout {layout!r} of {len(shape)} dimensions"
    return [by_letter.get(letter, []) for letter in layout]
