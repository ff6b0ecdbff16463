"""Checks which weights decay, against their names."""

import re

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.step.adam import Adam

# Names of weights that are added to activations, or multiplied with them elementwise.
_NEVER = re.compile(
    r"(^|\.)(b_\w+|\w*bias|scale|gate_scale|sinks|log_rate|skip|w_\w+_taps|shared_relative_bias\.table)$"
)


def check_decay(specs: NestedMap) -> dict[str, bool]:
    """Checks what a step of Adam without gradients leaves of weights of 1, with a decay of 0.1.

    Args:
      specs: the weights' tree of VariableSpec.

    Returns:
      Path -> whether the weight decays.
    """
    optimizer = Adam(Adam.params().set(weight_decay=0.1))
    ones = specs.transform(lambda spec: tf.ones(spec.shape))
    zeros = specs.transform(lambda spec: tf.zeros(spec.shape))
    start = optimizer.moment_specs(specs).transform(lambda spec: spec.init(tf.constant([0, 0])))
    index, rate = tf.constant(0), tf.constant(1.0)
    theta, _ = optimizer.update(specs, ones, zeros, start, index, rate, False)
    decays = {}
    for (path, spec), weight in zip(specs.flatten_items(), theta.flatten(), strict=True):
        if spec.update_rule:
            continue
        decays[path] = not (_NEVER.search(path) or spec.is_frozen)
        expected = np.full(spec.shape, 0.9 if decays[path] else 1.0, np.float32)
        np.testing.assert_allclose(weight, expected, rtol=1e-6, err_msg=path)
    return decays
