"""The split of decoding over a mesh: weights as in training, rows over all that splits tokens."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core.letters import POSITIONS
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.strategies import Strategy


def decoding_partitioning(partitioning: Partitioning) -> Partitioning:
    """Returns the partitioning of decoding programs.

    A step has one position for each hypothesis, so that positions are not split. Rows are split
    over the axes of token groups instead: every device that computes tokens of its own in training
    decodes texts of its own. Weights keep their layout.
    """
    overrides = tuple((pattern, _unsplit(table)) for pattern, table in partitioning.overrides)
    found = partitioning.strategy
    groups, rows = (found.activations.get(letter, ()) for letter in "GB")
    axes = groups + tuple(axis for axis in rows if axis not in groups)
    strategy = _unsplit(found, B=axes, G=axes)
    return dataclasses.replace(partitioning, strategy=strategy, overrides=overrides)


def row_parts(partitioning: Partitioning | None) -> int:
    """Returns the number of batches that a mesh decodes at once; 1 without a mesh."""
    if partitioning is None:
        return 1
    return partitioning.parts(decoding_partitioning(partitioning).split("B")[0])


def _unsplit(strategy: Strategy, **rules: tuple[str, ...]) -> Strategy:
    """Returns a strategy with other rules for activations, and none for their positions."""
    kept = {x: axes for x, axes in strategy.activations.items() if x not in POSITIONS}
    return dataclasses.replace(strategy, activations=kept | rules)
