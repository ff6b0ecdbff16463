"""Partitioning: decides how every tensor is split over the mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import UserError, VariableSpec, context, names, tf
from lingvo_gshard.core.context import Scope
from lingvo_gshard.core.letters import LETTERS, POSITIONS, UNNAMED, check_layout
from lingvo_gshard.sharding import strategies
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split, Strategy


def by_letter(
    wanted: Mapping[str, Sequence[str]], layout: str, reserved_axes: Collection[str]
) -> Split:
    """Returns the split of an activation: the first letter to claim an axis gets it.

    Args:
      wanted: For each letter, the axes that its rule has. Letters that the layout lacks claim
        theirs, too.
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

    It is stored in equal parts. An axis that does not divide the dimension of the first letter that
    may have it therefore goes to the next such letter. Then the spare axes go to the largest
    dimensions that they divide. Axes that are still free go to the first letter that may have them,
    although its last parts are then smaller: XLA pads them during the step.

    Args:
      wanted: As in `by_letter`.
      spare: Axes that may split any dimension, except of stacked layers.
      unsplit: Letters that may not be split.
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
    """Returns a selection of the axes, in order, that divides a dimension evenly."""
    found: list[str] = []
    for axis in axes:
        if size % mesh.parts([*found, axis]) == 0:
            found.append(axis)
    return tuple(found)


def _in_order(letters: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns letters in the order of their claims on axes: positions last."""
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


# The kind of master weights, which a step casts and gathers for its layers
# (training/step/precision.py). They are split like moments, unless a table splits weights further
# than their moments.
MASTERS = "masters"
_OVERRIDES = "sharding.overrides"
# A dimension of the state is padded if it is at least this many times as large as its padding.
# Others are stored whole: of a few experts on many devices, most of the array would be padding.
_LEAST_PADDED = 8
# Number of elements below which no dimension without a rule is split: gathering so small a weight
# costs more than keeping it.
_LEAST_SPLIT = 2**16


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """A mesh, a strategy on it, and other strategies for some layers.

    Attributes:
      overrides: (pattern, strategy) pairs, for layers with rules of their own. A pattern is the
        path of a layer or weight, such as `task.encoder.layers[1].feed_forward`, with the wildcards
        "*" and "?". It includes everything below that path. If several patterns with a rule for a
        letter match, the last one wins.
      reserved_axes: Axes that no letter may claim, see `within_stack`.
      pads_state: Whether dimensions of the state are padded in storage, if the padding is small, so
        that axes can split them that do not divide them.
      platform: The platform of the devices whose kernels a program may use, such as "tpu"; "" for a
        program that any platform runs. See the package's folder kernels.
      device_kind: jax's name of the devices, such as "NVIDIA H100 80GB HBM3"; "" if it is unknown.
    """

    mesh: Mesh
    strategy: Strategy
    overrides: tuple[tuple[str, Strategy], ...] = ()
    reserved_axes: tuple[str, ...] = ()
    platform: str = ""
    device_kind: str = ""
    pads_state: bool = False

    @classmethod
    def make(
        cls, mesh: Mesh | str, strategy: str, overrides: Mapping[str, str] | None = None
    ) -> Partitioning:
        """Returns the partitioning that texts describe.

        Args:
          mesh: A mesh, or its text, such as "data=4,model=2".
          strategy: Text of a strategy, such as "expert_tensor", see strategies.py.
          overrides: Pattern -> table, such as {"*.feed_forward": "weights: H->none"}.

        Raises:
          UserError: A mesh, strategy or table cannot be read. The message names the option or the
            pattern.
        """
        mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
        tables = []
        for pattern, text in (overrides or {}).items():
            where = f"{_OVERRIDES}[{pattern!r}]"
            if not isinstance(text, str) or "->" not in text:
                raise UserError(f"{where}={text}; expected a table of letters, as in H->model")
            tables.append((pattern, strategies.get(text, mesh, where)))
        return cls(mesh, strategies.get(strategy, mesh), tuple(tables))

    @property
    def unused_axes(self) -> tuple[str, ...]:
        """Axes of more than one device that split nothing: their devices repeat the same work."""
        used = self.strategy.axes.union(*(table.axes for _, table in self.overrides))
        return tuple(name for name, size in self.mesh.axes if size > 1 and name not in used)

    def split(
        self,
        layout: str,
        kind: str = "activations",
        path: str = "",
        unsplit: str = "",
        reserved: str = "",
        shape: Sequence[int] | None = None,
    ) -> Split:
        """Returns the mesh axes that split each dimension of a tensor.

        A mesh axis can split one dimension of a tensor only. The first letter to claim an axis gets
        it. Positions (L and K) claim theirs after all other letters. If the shape is known, letters
        whose dimensions divide evenly claim before the others; see claims.py.

        Args:
          kind: "activations", "weights", "moments" (of the optimizer) or "masters" (see
            `MASTERS`).
          path: Path of the layer or weight, which determines the overrides that apply.
          unsplit: Letters that are not split in this tensor.
          reserved: Letters that this tensor lacks but that tensors combined with it have. Their
            axes are not used here.
          shape: Sizes of the dimensions, of weights and moments.

        Raises:
          UserError: A letter is unknown or repeated, or there is no such kind.
        """
        check_layout(layout + reserved, None)
        if kind == MASTERS:
            assert shape is not None, f"the shape of master weights, {layout}, is unknown"
            kind = self.kind_of_masters(layout, shape, path, unsplit)
        rules = dict(self.strategy.table(kind))
        for pattern, override in self.overrides:
            if matches_path(pattern, path):
                rules.update(override.table(kind))
        wanted = {
            each: () if each in unsplit else strategies.axes_of(each, rules)
            for each in layout + reserved
        }
        if shape is None:
            return by_letter(wanted, layout, self.reserved_axes)
        spare = rules.get(strategies.ANY, ()) if math.prod(shape) >= _LEAST_SPLIT else ()
        return by_size(layout, shape, wanted, spare, unsplit, self.mesh, self.reserved_axes)

    def kind_of_masters(
        self, layout: str, shape: Sequence[int], path: str = "", unsplit: str = ""
    ) -> str:
        """Returns the kind of tensor that master weights are split as.

        It is "moments" if every dimension of a moment of this layout is split over all axes that
        split the weight's dimension, and some dimension over more. Otherwise it is "weights".
        Arguments are as in `split`.
        """
        weights, moments = (
            self.state_split(shape, self.split(layout, kind, path, unsplit, shape=shape))
            for kind in ("weights", "moments")
        )
        pairs = zip(weights, moments, strict=True)
        is_finer = weights != moments and all(set(few) <= set(many) for few, many in pairs)
        return "moments" if is_finer else "weights"

    def within_stack(self, letter: str) -> Partitioning:
        """Returns the partitioning of slices along a stacked dimension.

        The axes that split the stack are reserved, so that no dimension of a slice uses them.

        Args:
          letter: The stacked dimension, for example "P" for pipeline stages.
        """
        return dataclasses.replace(self, reserved_axes=self.split(letter)[0])

    def spec_split(self, spec: VariableSpec, kind: str = "weights") -> Split:
        """Returns the split of a weight, or of its moments or master weights; see `split`."""
        return self.split(spec.layout, kind, spec.path, spec.unsplit, shape=spec.shape)

    def is_gathered(self, spec: VariableSpec) -> bool:
        """Returns whether a step gathers a weight from its master weight, which is split more."""
        return self.spec_split(spec, MASTERS) != self.spec_split(spec)

    def with_padded_state(self) -> Partitioning:
        """Returns this partitioning for a state that is padded in storage; see `pads_state`."""
        return dataclasses.replace(self, pads_state=True)

    def on(self, platform: str, device_kind: str = "") -> Partitioning:
        """Returns this partitioning for devices, whose kernels programs then use."""
        return dataclasses.replace(self, platform=platform, device_kind=device_kind)

    def parts(self, axes: Iterable[str]) -> int:
        """Returns the number of parts of a dimension that is split over `axes`."""
        return self.mesh.parts(axes)

    def storage_split(self, shape: Sequence[int], split: Split) -> Split:
        """Returns an array's split in storage between steps, given its split during the step.

        jax stores arrays in equal parts only. Axes that do not divide a dimension evenly do not
        split it in storage. During the step XLA splits it with padding.
        """
        return tuple(even(size, axes, self.mesh) for size, axes in zip(shape, split, strict=True))

    def state_split(self, shape: Sequence[int], split: Split) -> Split:
        """Returns a state array's split in storage between steps, given its split during the step.

        It equals `storage_split` except for dimensions that are padded.
        """
        return tuple(
            axes if self._is_padded(size, axes) else even(size, axes, self.mesh)
            for size, axes in zip(shape, split, strict=True)
        )

    def stored_shape(self, shape: Sequence[int], split: Split) -> tuple[int, ...]:
        """Returns the shape in storage of an array with a split of `state_split`."""
        pairs = zip(shape, split, strict=True)
        return tuple(-(-size // self.parts(axes)) * self.parts(axes) for size, axes in pairs)

    def _is_padded(self, size: int, axes: Sequence[str]) -> bool:
        """Returns whether a dimension is padded, in storage, to a multiple of its parts."""
        padding = -size % self.parts(axes)
        return self.pads_state and padding > 0 and padding * _LEAST_PADDED <= size

    def spec_storage_split(self, spec: VariableSpec, kind: str = "weights") -> Split:
        """Returns the split of `spec_split` in storage between steps."""
        return self.state_split(spec.shape, self.spec_split(spec, kind))

    def check_overrides(self, paths: Iterable[str]) -> None:
        """Checks that every override matches one of the paths of layers and weights.

        Raises:
          UserError: An override matches none. The message names it and the nearest path.
        """
        paths = list(paths)
        for pattern, _ in self.overrides:
            if not any(matches_path(pattern, path) for path in paths):
                raise UserError(
                    f"{_OVERRIDES}: no layer or weight is named {pattern!r}. "
                    f"{names.nearest(pattern.removeprefix('task.'), paths)}"
                )


def matches_path(pattern: str, path: str) -> bool:
    """Returns whether a pattern matches a path or the path of a layer that contains it.

    Args:
      pattern: A path with the wildcards "*" and "?". It may begin with "task.", as Params paths do.
      path: Path of a layer or weight, relative to the task, such as `encoder.layers[1]`.
    """
    pattern = pattern.replace("[", "[[]")
    steps = ["task", *filter(None, path.partition("/")[0].split("."))]
    prefixes = [".".join(steps[:end]) for end in range(1, len(steps) + 1)]
    return any(
        fnmatch.fnmatchcase(name, pattern)
        or fnmatch.fnmatchcase(name.removeprefix("task."), pattern)
        for name in prefixes
    )


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The sharding of the function that is being traced.

    Attributes:
      partitioning: The partitioning that annotations follow, or None if they have no effect.
      manual_partitioning: The partitioning of the manual region being traced, None outside.
    """

    partitioning: Partitioning | None = None
    manual_partitioning: Partitioning | None = None


_scope: Scope[Sharding] = Scope("sharding", Sharding(), holds_in_gradients=True)


def current_sharding() -> Sharding:
    """Returns the sharding that holds now."""
    return _scope.get()


def override_sharding(**fields: Any) -> contextlib.AbstractContextManager[Sharding]:
    """Changes fields of the current sharding inside a `with` block."""
    return _scope.use(dataclasses.replace(current_sharding(), **fields))


def current_partitioning() -> Partitioning | None:
    """Returns the partitioning that annotations follow, or None if they have no effect."""
    return current_sharding().partitioning


def use_partitioning(
    partitioning: Partitioning | None,
) -> contextlib.AbstractContextManager[Sharding]:
    """Makes annotations inside a `with` block follow a partitioning; None switches them off."""
    return override_sharding(partitioning=partitioning)


def axes_of(layout: str) -> Split:
    """Returns the mesh axes that split each dimension of an activation.

    The layer that is computing determines which overrides apply. Axes of one device are left out.

    Returns:
      For each letter the axes, major first. All are empty if nothing is partitioned or TensorFlow
      executes eagerly.
    """
    partitioning = current_partitioning()
    if partitioning is None or tf.executing_eagerly():
        return ((),) * len(layout)
    return tuple(
        tuple(axis for axis in axes if partitioning.mesh.axis_size(axis) > 1)
        for axes in partitioning.split(layout, path=context.layer_path())
    )


def parts_of(layout: str) -> tuple[int, ...]:
    """Returns the number of parts that each dimension of an activation is split into."""
    partitioning = current_partitioning()
    return tuple(partitioning.parts(a) if partitioning else 1 for a in axes_of(layout))
