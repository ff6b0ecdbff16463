"""The state of one model made of another's: weights and moments by the names of their layers.

Of a loop's stack each slice goes by the name that it would have without the loop, so that what is
taken from where does not depend on which layers are loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.checkpoint.arrays import Arrays
from lingvo_gshard.training.trainer import Trainer

# find(name, layout, shape): the array to be taken; None: it begins as if nothing were trained.
Find = Callable[[str, str, tuple[int, ...]], np.ndarray | None]


def by_name(specs: NestedMap, arrays: Arrays) -> Arrays:
    """Returns arrays by the names of their layers; `arrays` are by the dotted paths of `specs`."""
    found: Arrays = {}
    for path, spec in specs.flatten_items():
        if spec.slices:
            slices = arrays[path].reshape(-1, *spec.shape[spec.stacked :])
            found.update(zip(_slices(spec), slices, strict=True))
        else:
            found[path] = arrays[path]
    return found


def make(specs: NestedMap, find: Find, seed: int) -> NestedMap:
    """Returns NumPy arrays in the structure of `specs`, each the one that `find` gives."""
    key = tf.constant([seed & 0x7FFFFFFF, 0], tf.int32)

    def made(path: str, spec: VariableSpec) -> np.ndarray:
        fresh = functools.cache(lambda: spec.init(key).numpy())
        if not spec.slices:
            array = find(path, spec.layout, spec.shape)
            return fresh() if array is None else np.ascontiguousarray(array)
        layout, shape = spec.layout[spec.stacked :], spec.shape[spec.stacked :]
        arrays = [find(name, layout, shape) for name in _slices(spec)]
        begun = (
            a if a is not None else fresh().reshape(-1, *shape)[i] for i, a in enumerate(arrays)
        )
        return np.stack(list(begun)).reshape(spec.shape)

    return specs.transform_with_path(made)


def of_trainer(trainer: Trainer, find: Find, find_moment: Find) -> NestedMap:
    """Returns the weights, the moments and what else a run of this trainer goes on from.

    Averages of the weights begin with the weights.
    """
    specs, seed = trainer.state_specs(), trainer.p.seed
    theta, moments = make(specs.theta, find, seed), make(specs.moments, find_moment, seed)
    beside = trainer.initial_extras(theta).transform(np.asarray)
    return NestedMap(theta=theta, moments=moments, **beside)


def _slices(spec: VariableSpec) -> list[str]:
    """The names of a stack's slices; a moment's path is that of its weight, a stroke, its name."""
    _, _, moment = spec.path.partition("/")
    return [f"{path}.{moment}" if moment else path for path in spec.slices]
