"""Rules on numbers: each reads one mistake from a wrong tensor and the right one.

A rule returns a sentence if the numbers show its pattern, and "" otherwise. In float64 no pattern
comes about by chance: all comparisons here are far below the size of any defect.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from lingvo_gshard.sharding import Mesh, Split

# Numbers are equal up to this share of the largest number of the right tensor.
_EQUAL = 1e-7
# So many numbers in a tensor must differ to tell from them where they come from.
_FEWEST_VALUES = 4
_SHOWN = 8
_ENDS = {0: "first shard", -1: "last shard"}

Axes: TypeAlias = tuple[str, ...]


def named(groups: Sequence[Axes]) -> str:
    """Returns the names of candidate groups of mesh axes, joined by "or"."""
    return " or ".join(" and ".join(group) for group in groups)


def groups_of(mesh: Mesh) -> list[Axes]:
    """Returns all groups of mesh axes with more than one device, single axes first."""
    names = [name for name, size in mesh.axes if size > 1]
    return [g for count in range(len(names)) for g in itertools.combinations(names, count + 1)]


@dataclasses.dataclass(frozen=True)
class Cut:
    """A dimension in equal parts, as devices compute it.

    Attributes:
      axes: the groups of mesh axes that can be meant, each of so many devices.
      is_known: whether devices hold these parts of the result; otherwise they may compute them.
    """

    dimension: int
    parts: int
    axes: tuple[Axes, ...]
    is_known: bool = False

    def __str__(self) -> str:
        shards = f"{self.parts} shards along {named(self.axes)}"
        how = f"in {shards}" if self.is_known else f"if cut into {shards}"
        return f"dimension {self.dimension}, {how},"

    def blocks(self, x: np.ndarray) -> np.ndarray:
        """Returns [parts, size of a part, all other elements]."""
        moved = np.moveaxis(x, self.dimension, 0)
        return moved.reshape(self.parts, moved.shape[0] // self.parts, -1)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A wrong tensor and the right one, float64, of one shape with at least two elements."""

    wrong: np.ndarray
    right: np.ndarray
    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, wrong: np.ndarray, right: np.ndarray, split: Split | None, mesh: Mesh) -> Pair:
        """Returns the pair of a partitioned and a whole result. An unknown `split` is None."""
        known, possible = [], []
        for dimension, size in enumerate(right.shape):
            axes = split[dimension] if split else ()
            if axes and size % mesh.parts(axes) == 0:
                # The last axis varies fastest: an outer part is cut by the first axes alone.
                outer = [tuple(axes[: n + 1]) for n in range(len(axes))]
                known += [Cut(dimension, mesh.parts(group), (group,), True) for group in outer]
                continue
            by_parts: dict[int, list[Axes]] = {}
            for group in groups_of(mesh):
                by_parts.setdefault(mesh.parts(group), []).append(group)
            possible += [
                Cut(dimension, parts, tuple(groups))
                for parts, groups in by_parts.items()
                if size % parts == 0
            ]
        cuts = (*known, *possible)
        return cls(np.asarray(wrong, np.float64), np.asarray(right, np.float64), cuts)

    @functools.cached_property
    def scale(self) -> float:
        """The largest number of the right tensor."""
        return float(np.abs(self.right).max(initial=0.0))

    def close(self, mine: np.ndarray, other: np.ndarray | float) -> np.ndarray:
        """Returns for each element whether two tensors are equal but for rounding."""
        return np.asarray(np.abs(mine - other) <= _EQUAL * self.scale)

    @functools.cached_property
    def is_equal(self) -> np.ndarray:
        """Whether each element is right."""
        return self.close(self.wrong, self.right)

    def long_cuts(self) -> Iterator[tuple[Cut, np.ndarray, np.ndarray]]:
        """Yields cuts into parts of at least two elements, with the blocks of both tensors."""
        for cut in self.cuts:
            wrong, right = cut.blocks(self.wrong), cut.blocks(self.right)
            if right.shape[1] > 1:
                yield cut, wrong, right


def _origins(pair: Pair, wrong: np.ndarray, right: np.ndarray) -> np.ndarray | None:
    """Returns for each wrong row the index of the only right row that equals it; or else None."""
    by = np.random.default_rng(0).uniform(1, 2, right.shape[1])
    mine, its = wrong @ by, right @ by
    order = np.argsort(its)
    if len(its) < 2 or np.diff(its[order]).min() <= 4 * _EQUAL * pair.scale * len(by):
        return None
    after = np.clip(np.searchsorted(its[order], mine), 1, len(its) - 1)
    low, high = order[after - 1], order[after]
    nearest = np.where(np.abs(its[low] - mine) < np.abs(its[high] - mine), low, high)
    return nearest if bool(pair.close(wrong, right[nearest]).all()) else None


def other_shards(pair: Pair) -> str:
    """Names shards that are right and stand at other places."""
    for cut in pair.cuts:
        wrong, right = (cut.blocks(x).reshape(cut.parts, -1) for x in (pair.wrong, pair.right))
        origin = _origins(pair, wrong, right) if right.size > _FEWEST_VALUES else None
        if origin is None:
            continue
        if (origin == origin[0]).all():
            return (
                f"along {cut} every shard is a copy of shard {origin[0]}: a gather or slice takes "
                "indices of one shard for indices of the whole tensor"
            )
        shown = ", ".join(map(str, origin[:_SHOWN])) + (", ..." if cut.parts > _SHOWN else "")
        return (
            f"along {cut} the shards are right and stand at other places: {shown}. Shards are "
            "gathered from or sent to wrong devices, or a split names its mesh axes in another "
            "order (swapped axes)"
        )
    return ""


def other_slices(pair: Pair) -> str:
    """Names slices of one dimension that are right and stand at other places."""
    for dimension, count in enumerate(pair.right.shape):
        wrong, right = (
            np.moveaxis(x, dimension, 0).reshape(count, -1) for x in (pair.wrong, pair.right)
        )
        origin = _origins(pair, wrong, right) if count >= _FEWEST_VALUES else None
        if origin is None:
            continue
        cuts = [cut for cut in pair.cuts if cut.dimension == dimension]
        found = filter(None, (_moved_within(origin, cut) for cut in cuts))
        first = int(np.argmax(origin != np.arange(count)))
        how = (
            "its slices are right and in another order"
            if len(set(origin.tolist())) == count
            else "some of its slices stand where others should"
        )
        return next(found, "") or (
            f"along dimension {dimension} {how}: index {first} has the slice of index "
            f"{origin[first]}. A gather, slice or reshape takes them from wrong places"
        )
    return ""


def _moved_within(origin: np.ndarray, cut: Cut) -> str:
    """Returns a sentence if slices moved only within shards, or between all shards; or ""."""
    size = len(origin) // cut.parts
    blocks = origin.reshape(cut.parts, size)
    if size > 1 and (blocks // size == np.arange(cut.parts)[:, None]).all():
        return (
            f"along {cut} each shard has its own slices in another order: a sort, reverse, roll "
            "or shuffle sees one shard instead of the whole dimension"
        )
    index = np.arange(len(origin))
    turned = [index.reshape(shape).T.ravel() for shape in ((cut.parts, size), (size, cut.parts))]
    if any(np.array_equal(origin, each) for each in turned):
        return (
            f"along {cut} the slices of the shards are interleaved: dimensions are swapped in a "
            "reshape or transpose, the device's index and the index within its shard"
        )
    return ""


def other_places(pair: Pair) -> str:
    """Names values that are all right and stand at other places, as after swapped dimensions."""
    wrong, right = pair.wrong, pair.right
    values = np.sort(right.ravel())
    distinct = np.count_nonzero(np.diff(values) > 2 * _EQUAL * pair.scale) + 1
    if distinct < max(_FEWEST_VALUES, right.size // 2):
        return ""
    if not pair.close(np.sort(wrong.ravel()), values).all():
        return ""
    text = "all its values are right and stand at other places"
    # The first order moves nothing.
    for order in itertools.islice(itertools.permutations(range(right.ndim)), 1, None):
        moved = np.transpose(right, order).reshape(right.shape)
        if pair.close(wrong, moved).all():
            return f"{text}, as after a transpose to {list(order)}: its dimensions are swapped"
    for dimension in range(right.ndim):
        mine, its = (np.sort(x, dimension) for x in (wrong, right))
        if right.ndim > 1 and pair.close(mine, its).all():
            return (
                f"{text} along dimension {dimension}: a sort, reverse or gather along it sees one "
                "shard instead of the whole dimension, or takes wrong indices"
            )
    return f"{text}: dimensions are swapped, joined in another order, or gathered along another"


def _multiple(wrong: np.ndarray, right: np.ndarray, over: int | tuple[int, ...]) -> np.ndarray:
    """Returns the numbers whose products with the right elements are nearest to the wrong ones."""
    square = np.sum(right * right, over, keepdims=True)
    return np.sum(wrong * right, over, keepdims=True) / np.where(square, square, 1.0)


def scaled_shards(pair: Pair) -> str:
    """Names shards that are multiples of the right ones, each by a number of its own."""
    for cut, wrong, right in pair.long_cuts():
        for over in ((1, 2), (1,)):
            by = _multiple(wrong, right, over)
            is_apart = np.ptp(by, axis=0).max() > _EQUAL * np.abs(by).max(initial=1.0)
            if not is_apart or not pair.close(wrong, by * right).all():
                continue
            text = f"along {cut} each shard is the right one times a number of its own"
            for end, others in ((0, "earlier"), (-1, "later")):
                if np.allclose(by[end], 1.0, atol=_EQUAL):
                    return (
                        f"{text}, and the {_ENDS[end]} is right: a running product or state lacks "
                        f"the carry of {others} shards, or positions are counted within the shard"
                    )
            return (
                f"{text}: it is normalized (softmax, norm, mean) by one shard instead of the whole "
                "dimension"
            )
    return ""


def normalized_shards(pair: Pair) -> str:
    """Names shards that are multiples of the right ones plus a number, each by its own numbers."""
    for cut, wrong, right in pair.long_cuts():
        if right.shape[1] < _FEWEST_VALUES:
            continue
        mine, its = (x - x.mean(1, keepdims=True) for x in (wrong, right))
        by = _multiple(mine, its, 1)
        offset = wrong - by * right
        is_apart = not (np.allclose(by, by[:1]) and np.allclose(offset, offset[:1]))
        if is_apart and pair.close(mine, by * its).all():
            return (
                f"along {cut} each shard is a multiple of the right one plus a number: it is "
                "normalized by the mean and the norm of one shard instead of the whole dimension"
            )
    return ""


def shifted_shards(pair: Pair) -> str:
    """Names shards that differ from the right ones by a number of their own."""
    for cut, wrong, right in pair.long_cuts():
        offset = wrong - right
        by = offset[:, :1]
        if not pair.close(offset, by).all() or pair.close(by, by[:1]).all():
            continue
        text = f"along {cut} each shard differs by an amount of its own"
        for end, others in ((0, "earlier"), (-1, "later")):
            if pair.close(by[end], 0.0).all():
                return f"{text}{_carry(by, right, end, others)}"
        return f"{text}: a mean or a maximum of one shard stands for that of the whole dimension"
    return ""


def _carry(by: np.ndarray, right: np.ndarray, end: int, others: str) -> str:
    """Returns the end of a sentence on shards that differ by an amount, but for that at an end."""
    if end:
        by, right = by[::-1], right[::-1, ::-1]
    scale = _EQUAL * np.abs(right).max()
    before = np.concatenate([np.zeros_like(right[:1, :1]), right[:-1, -1:]])
    is_sum = any(np.abs(by + each).max() <= scale for each in (before, right[:, :1]))
    # Positions are running sums of ones.
    if is_sum and np.ptp(np.diff(right, axis=1)) > scale:
        return f", the sum of {others} shards: a running sum (cumsum) lacks their carry"
    return (
        f", and the {_ENDS[end]} is right: positions are counted within the shard, or "
        f"a running sum (cumsum) lacks the carry of {others} shards"
    )


def missing_parts(pair: Pair) -> str:
    """Names shards, or a tail, that are zero where the right tensor is not."""
    wrong_places = ~pair.is_equal
    if np.any(pair.wrong[wrong_places]):
        return ""
    for cut in pair.cuts:
        lost = cut.blocks(wrong_places).any((1, 2))
        wrong, right = cut.blocks(pair.wrong), cut.blocks(pair.right)
        if lost.all() or wrong[lost].any() or not right[lost].any((1, 2)).all():
            continue
        zero, kept = (", ".join(map(str, np.flatnonzero(k)[:_SHOWN])) for k in (lost, ~lost))
        return (
            f"along {cut} zeros stand for shard {zero}, and shard {kept} is right: what the other "
            "devices compute is dropped, as the rest of a dimension (tail) or by a test of the "
            "device's place"
        )
    for dimension in range(pair.right.ndim):
        rest = tuple(i for i in range(pair.right.ndim) if i != dimension)
        index = np.flatnonzero(wrong_places.any(rest))
        end = pair.right.shape[dimension]
        tail = np.take(pair.wrong, range(index[0], end), dimension)
        if 0 < index[0] and index[-1] == end - 1 and not tail.any():
            return (
                f"along dimension {dimension} all from index {index[0]} on is zero: the last "
                f"{end - index[0]} of {end} are dropped, as when a size does not divide by devices"
            )
    return ""


def added_again(pair: Pair) -> str:
    """Names a difference, or a ratio, that is the same along a whole dimension."""
    for dimension in range(pair.right.ndim):
        if pair.right.shape[dimension] < 3:
            continue
        wrong, right = (np.moveaxis(x, dimension, 0) for x in (pair.wrong, pair.right))
        offset = wrong - right
        if pair.close(offset, offset[:1]).all() and not pair.close(right, right[:1]).all():
            return (
                f"it differs by the same amounts all along dimension {dimension}: a term that does "
                "not depend on this dimension, such as a bias or a mean, is wrong. A bias that is "
                "added before a sum over devices (psum) counts once for each device"
            )
        by = _multiple(wrong, right, 0)
        if by.size > 1 and pair.close(wrong, by * right).all() and not np.allclose(right, right[0]):
            return (
                f"it is a multiple of the whole one all along dimension {dimension}, by other "
                "numbers for other slices: a factor that does not depend on this dimension, such "
                "as a mean or a norm, is wrong"
            )
    return ""


def wrong_borders(pair: Pair) -> str:
    """Names a difference at all borders of shards and nowhere else, where neighbors are missing."""
    for cut, _, right in pair.long_cuts():
        wrong = np.asarray(~cut.blocks(pair.is_equal).all(2))
        index, size = np.flatnonzero(wrong.any(0)), right.shape[1]
        starts, ends = index[index < size / 2], index[index >= size / 2]
        width = max(len(starts), len(ends))
        is_border = (starts < width).all() and (ends >= size - width).all()
        is_outer_right = not (wrong[0, starts].any() or wrong[-1, ends].any())
        # Two parts that nobody cut have one border, where a difference can be by chance.
        if not cut.is_known and cut.parts == 2:
            continue
        is_at_all = all(
            bool(borders.any(1).all())
            for borders in (wrong[1:, starts], wrong[:-1, ends])
            if borders.size
        )
        if is_border and 3 * len(index) <= size and is_outer_right and is_at_all:
            by_position = ", or a mask counts positions of the shard" if not ends.size else ""
            return (
                f"along {cut} only the borders between shards are wrong: a convolution, shift or "
                f"window lacks the elements of the neighboring shard{by_position}"
            )
    return ""


def one_shard_right(pair: Pair) -> str:
    """Names a difference in all shards but one."""
    for cut in pair.cuts:
        is_right = cut.blocks(pair.is_equal).all((1, 2))
        # One of two parts that nobody cut can be right by chance.
        if is_right.sum() != 1 or (not cut.is_known and cut.parts == 2):
            continue
        index = int(np.flatnonzero(is_right)[0])
        which = {0: "the first shard", cut.parts - 1: "the last shard"}.get(index, f"shard {index}")
        by_shard = (
            "by numbers of their own shard (a maximum, a state that other shards hand on), where "
            "the whole tensor is meant"
        )
        if index in (0, cut.parts - 1):
            by_shard = f"by their own positions (a mask, a random key) or {by_shard}"
        return f"only {which} along {named(cut.axes)} is right: devices compute {by_shard}"
    return ""


# In this order: the more a pattern says, the earlier its rule is tried.
RULES: tuple[Callable[[Pair], str], ...] = (
    other_shards,
    other_slices,
    missing_parts,
    shifted_shards,
    scaled_shards,
    normalized_shards,
    other_places,
    wrong_borders,
)


def joined_copies(
    copies: Sequence[tuple[np.ndarray, tuple[slice, ...]]],
    right: np.ndarray,
    axes: Axes,
    mesh: Mesh,
) -> str:
    """Returns a sentence on how unequal copies of shards make up the whole; "" if they do not."""
    over = " and ".join(axes)
    scale = _EQUAL * float(np.abs(right).max(initial=0.0))

    def is_whole(join: Callable[[np.ndarray], Any], times: float = 1.0) -> bool:
        return all(
            bool((np.abs(join(each) - times * right[place]) <= scale * times).all())
            for each, place in copies
        )

    if is_whole(lambda each: each.sum(0)):
        return f"their sum is the whole: a sum over {over} (psum) is missing"
    ways = []
    if is_whole(lambda each: each.mean(0)):
        ways.append(f"their mean is the whole: a mean over {over} is missing")
    shards = [right[place] for _, place in copies]
    total = np.sum(shards, 0) if len({each.shape for each in shards}) == 1 else right
    for other in groups_of(mesh):
        if set(other) & set(axes):
            continue
        times = mesh.parts(other)
        is_of_shards = len(shards) == times and all(
            bool((np.abs(each.sum(0) - total) <= scale * times).all()) for each, _ in copies
        )
        if is_of_shards or is_whole(lambda each: each.sum(0), times):
            ways.append(
                f"their sum has {times} times too many summands: it is summed over "
                f"{named([other])} where a sum over {over} (psum) is meant (swapped axes)"
            )
    for name, join in (("largest", np.max), ("smallest", np.min)):
        if is_whole(lambda each, join=join: join(each, 0)):
            ways.append(f"the {name} of each is the whole: the {name} over {over} is missing")
    if ways:
        return ", or ".join(ways)
    if is_whole(lambda each: each[0]):
        return (
            "only the first device's is right: each device computes by its own place (a "
            "random key, a mask, a slice) where all should compute the same"
        )
    return ""
