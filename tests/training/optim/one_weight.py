"""Trains one weight on given gradients, for comparison with recurrences in NumPy."""

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap

SHAPES = {"MH": (6, 8), "H": (8,)}


def spec(layout: str, path: str = "w") -> VariableSpec:
    """Returns the spec of a weight of SHAPES."""
    return VariableSpec(path, layout, SHAPES[layout], "float32", initializers.constant(0.0))


def draw(layout: str, steps: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a weight, its gradients and the learning rates of as many steps."""
    generator = np.random.default_rng(0)
    start = generator.normal(size=SHAPES[layout]).astype(np.float32)
    gradients = generator.normal(size=(steps, *SHAPES[layout])).astype(np.float32)
    return start, gradients, np.linspace(0.1, 0.02, steps).astype(np.float32)


def first_moments(optimizer, spec: VariableSpec) -> NestedMap:
    """Returns the moments before the first step."""
    specs = optimizer.moment_specs(NestedMap(w=spec))
    return specs.transform(lambda s: s.init(tf.constant([0, 0]))).w


def step(optimizer, spec: VariableSpec, weight, gradient, moments, index, rate, stopped=False):
    """Returns the weight and its moments after one step."""
    theta, moments = optimizer.update(
        NestedMap(w=spec),
        NestedMap(w=tf.constant(weight)),
        NestedMap(w=tf.constant(gradient)),
        NestedMap(w=moments),
        tf.constant(index),
        tf.constant(rate),
        stopped,
    )
    return theta.w, moments.w


def train(optimizer, spec: VariableSpec, start, gradients, rates):
    """Returns the weight and its moments after a step for each gradient."""
    weight, moments = start, first_moments(optimizer, spec)
    for index, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        weight, moments = step(optimizer, spec, weight, gradient, moments, index, rate)
    return weight, moments
