"""Builds the training state of one model from the state of another, array by array.

Arrays are matched by the names of their layers. Each slice of the stacked weights of a compiled
loop has the name that it would have without the loop. The arrays therefore match whether or not
either model compiles its layers as loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from lingvo_gshard.core import NestedMap, VariableSpec, tf
from lingvo_gshard.training import Arrays, Trainer

# find(name, layout, shape) returns the array to use, or None to draw the weight.
Find = Callable[[str, str, tuple[int, ...]], np.ndarray | None]


def by_name(specs: NestedMap, arrays: Arrays) -> Arrays:
    """Returns arrays, given by their dotted paths in `specs`, by the names of their layers."""
    found: Arrays = {}
    for path, spec in specs.flatten_items():
        if spec.slices:
            slices = arrays[path].reshape(-1, *spec.shape[spec.stacked :])
            found.update(zip(_slices(spec), slices, strict=True))
        else:
            found[_name(spec)] = arrays[path]
    return found


def make(specs: NestedMap, find: Find, seed: int) -> NestedMap:
    """Returns NumPy arrays in the structure of `specs`. The seed is for weights not found."""
    key = tf.constant([seed & 0x7FFFFFFF, 0], tf.int32)

    def make_array(_: str, spec: VariableSpec) -> np.ndarray:
        fresh = functools.cache(lambda: spec.init(key).numpy())
        if not spec.slices:
            array = find(_name(spec), spec.layout, spec.shape)
            return fresh() if array is None else np.ascontiguousarray(array)
        layout, shape = spec.layout[spec.stacked :], spec.shape[spec.stacked :]
        arrays = [find(name, layout, shape) for name in _slices(spec)]
        slices = (
            a if a is not None else fresh().reshape(-1, *shape)[i] for i, a in enumerate(arrays)
        )
        return np.stack(list(slices)).reshape(spec.shape)

    return specs.transform_with_path(make_array)


def of_trainer(trainer: Trainer, find: Find, find_moment: Find) -> NestedMap:
    """Returns the state that a run of the trainer of a new model starts with.

    Averages of the weights start at the weights.
    """
    specs, seed = trainer.state_specs(), trainer.p.seed
    theta, moments = make(specs.theta, find, seed), make(specs.moments, find_moment, seed)
    extras = trainer.initial_extras(theta).transform(np.asarray)
    return NestedMap(theta=theta, moments=moments, **extras)


def _name(spec: VariableSpec) -> str:
    return spec.path.replace("/", ".")


def _slices(spec: VariableSpec) -> list[str]:
    """Returns the names of a stack's slices. The path of a moment is `<weight>/<moment>`."""
    _, _, moment = spec.path.partition("/")
    return [f"{path}.{moment}" if moment else path for path in spec.slices]
