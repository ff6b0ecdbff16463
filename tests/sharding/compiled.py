"""Runs a TensorFlow function on virtual CPU devices and counts its collectives."""

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import partition

PARTITIONERS = ("gspmd", "shardy")


@dataclasses.dataclass(frozen=True)
class Ran:
    """Results as NumPy arrays, and the number of collectives of each kind."""

    results: list[np.ndarray]
    collectives: dict[str, int]


def run(
    function: Callable,
    *arguments: np.ndarray,
    mesh: str = "data=8",
    strategy: str = "replicated",
    partitioner: str = "gspmd",
) -> Ran:
    """Compiles a function for a mesh of CPU devices and runs it once."""
    partitioned = partition(function, mesh, strategy, partitioner=partitioner)
    results = tf.nest.flatten(partitioned(*arguments))
    found = partitioned.compile(*arguments).collectives()
    return Ran([np.asarray(x) for x in results], hlo.count_by_kind(found))
