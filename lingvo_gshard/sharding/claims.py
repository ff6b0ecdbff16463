"""Gives mesh axes to the dimensions of a tensor, where several letters may have one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lingvo_gshard.core.letters import LETTERS, POSITIONS, UNNAMED
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split


def by_letter(
    wanted: Mapping[str, Sequence[str]], layout: str, reserved_axes: Collection[str]
) -> Split:
    """Returns the split of an activation: the first letter to claim an axis gets it.

    Args:
      wanted: For each letter, the axes that its rule has. Letters that the layout lacks claim
        theirs, too.
      layout: Letters of the tensor.
      reserved_axes: Axes that no letter may claim.
    """
    split: dict[str, tuple[str, ...]] = {}
    claimed = set(reserved_axes)
    for letter in _in_order(wanted):
        split[letter] = tuple(axis for axis in wanted[letter] if axis not in claimed)
        claimed.update(split[letter])
    return tuple(split[letter] for letter in layout)


def by_size(
    layout: str,
    shape: Sequence[int],
    wanted: Mapping[str, Sequence[str]],
    spare: Sequence[str],
    unsplit: str,
    mesh: Mesh,
    reserved_axes: Collection[str],
) -> Split:
    """Returns the split of a weight or moment, whose sizes are known.

    It is stored in equal parts. So an axis that does not divide the dimension of the first letter
    that may have it goes to the next such letter. Then the spare axes go to the largest dimensions
    that they divide. Axes that are still free go to the first letter that may have them, although
    its last parts are then smaller: XLA pads them during the step.

    Args:
      layout: Letters of the tensor.
      shape: Sizes of the dimensions.
      wanted: As in `by_letter`.
      spare: Axes that may split any dimension, except of stacked layers.
      unsplit: Letters that may not be split.
      mesh: The mesh.
      reserved_axes: Axes that no letter may claim.
    """
    sizes = dict(zip(layout, shape, strict=True))
    split: dict[str, tuple[str, ...]] = dict.fromkeys(wanted, ())
    claimed = set(reserved_axes)
    for letter in _in_order(wanted):
        free = [axis for axis in wanted[letter] if axis not in claimed]
        split[letter] = even(sizes[letter], free, mesh) if letter in sizes else tuple(free)
        claimed.update(split[letter])
    for axis in spare:
        letter = None if axis in claimed else _largest(sizes, split, unsplit, axis, mesh)
        if letter is not None:
            split[letter] += (axis,)
            claimed.add(axis)
    for letter in _in_order(wanted):
        free = {axis for axis in wanted[letter] if axis not in claimed}
        if free:
            known = [axis for axis in wanted[letter] if axis in free or axis in split[letter]]
            split[letter] = (*known, *(axis for axis in split[letter] if axis not in known))
            claimed.update(free)
    return tuple(split[letter] for letter in layout)


def even(size: int, axes: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    """Returns those of the axes, in order, that together divide a dimension evenly."""
    found: list[str] = []
    for axis in axes:
        if size % mesh.parts([*found, axis]) == 0:
            found.append(axis)
    return tuple(found)


def _in_order(letters: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns letters in the order in which they claim: positions last."""
    return sorted(letters, key=lambda letter: letter in POSITIONS)


def _largest(
    sizes: Mapping[str, int],
    split: Mapping[str, Sequence[str]],
    unsplit: str,
    axis: str,
    mesh: Mesh,
) -> str | None:
    """Returns the letter of the dimension with the largest parts that an axis divides evenly."""
    parts = {}
    for letter, size in sizes.items():
        is_stack = letter in LETTERS and LETTERS[letter].is_stack
        if not (is_stack or letter in unsplit or letter == UNNAMED):
            if size % mesh.parts([*split[letter], axis]) == 0:
                parts[letter] = size // mesh.parts(split[letter])
    return max(parts, key=parts.__getitem__, default=None)
