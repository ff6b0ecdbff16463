"""The variables of a compiled Keras model, by path, with their layouts."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import UserError, known_sizes
from lingvo_gshard.core.lazy import keras
from lingvo_gshard.keras.layouts import MOMENTS, WEIGHTS, Layouts
from lingvo_gshard.runtime import Array, HeldVariable
from lingvo_gshard.sharding import Split

# Parts of the state, which begin the paths of its arrays.
THETA, OPTIMIZER, METRICS = "theta", "moments", "metrics"


def check_model(model: Any) -> None:
    """Raises UserError unless a model is a compiled Keras model that can be traced."""
    if not isinstance(model, keras.Model):
        raise UserError(f"expected a compiled Keras model; got {type(model).__name__}")
    if not model.compiled:
        raise UserError(f"{model.name} is not compiled; call compile with an optimizer and a loss")
    if model.run_eagerly:
        raise UserError(f"{model.name} has run_eagerly=True, but XLA compiles whole steps")


def build(model: Any, batch: Any) -> None:
    """Creates all variables of a model, its metrics and its optimizer.

    `batch` has arrays or `tf.TensorSpec`s, as the model's dataset yields them.
    """
    # Model.fit calls this before its first step.
    model._symbolic_build(data_batch=batch)


def held_variables(model: Any, layouts: Layouts) -> list[HeldVariable]:
    """Returns the variables of a built model: weights and seeds, the optimizer's, then metrics.

    Raises UserError if a layout does not fit a variable, or matches none.
    """
    layouts.check_used([variable.path for variable in model.variables])
    taken: collections.Counter[str] = collections.Counter()
    held, seen = [], set()
    for part, variable, split in _split_variables(model, layouts):
        if id(variable) in seen:
            continue
        seen.add(id(variable))
        path = f"{part}.{variable.path}"
        taken[path] += 1
        unique = path if taken[path] == 1 else f"{path}_{taken[path] - 1}"
        value = variable.value
        shape = tuple(known_sizes(value.shape))
        held.append(HeldVariable(value, Array(unique, shape, value.dtype.name, split)))
    return held


def own_layouts(model: Any) -> dict[str, str]:
    """Returns the letters of the weights of `gshard_layer`s, by the paths of the weights."""
    return {
        variable.path: layer.letters[variable.path]
        for layer in model._flatten_layers()
        for variable in (layer.weights if hasattr(layer, "letters") else ())
        if variable.path in layer.letters
    }


def _split_variables(model: Any, layouts: Layouts) -> Iterator[tuple[str, Any, Split]]:
    """Yields the part, the variable and the split of everything that a step may read."""
    metrics = {id(variable) for variable in model.metrics_variables}
    for variable in model.variables:
        if id(variable) not in metrics:
            yield THETA, variable, layouts.of_variable(variable.path, variable.shape, WEIGHTS)
    for variable in _recurrent_states(model):
        yield THETA, variable, layouts.of_batch(variable.shape)
    if model.optimizer is not None:
        weights = model.trainable_variables
        for variable in model.optimizer.variables:
            yield OPTIMIZER, variable, _split_of_moment(variable, weights, layouts)
    for variable in model.metrics_variables:
        yield METRICS, variable, ((),) * len(variable.shape)


def _recurrent_states(model: Any) -> Iterator[Any]:
    """Yields the states of stateful recurrent layers, which are not among a model's variables."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            yield from keras.tree.flatten(layer.states or ())


def _split_of_moment(variable: Any, weights: Sequence[Any], layouts: Layouts) -> Split:
    """Returns the split of a variable of the optimizer: its weight's split, if the shapes agree.

    Keras names the variable after the weight: `dense_kernel_momentum` for `dense/kernel`.
    """
    prefixes: Mapping[str, Any] = {f"{w.path.replace('/', '_')}_": w for w in weights}
    named = [prefix for prefix in prefixes if variable.name.startswith(prefix)]
    if named:
        weight = prefixes[max(named, key=len)]
        if tuple(weight.shape) == tuple(variable.shape):
            return layouts.of_variable(weight.path, weight.shape, MOMENTS)
    return ((),) * len(variable.shape)
