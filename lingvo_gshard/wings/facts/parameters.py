"""The weights of layers and tasks that take part in computing one token."""

from __future__ import annotations

import math

from lingvo_gshard.core import Layer, face
from lingvo_gshard.layers import Execution, MixtureOfExperts


@face
def active_parameters(layer: Layer) -> int:
    """Returns the number of weights of a layer that take part in computing one token.

    A mixture of experts counts only as many experts as each token is sent to. A class without a
    function counts all of its weights.
    """
    return all_parameters(layer)


def all_parameters(layer: Layer) -> int:
    """Returns the number of a layer's own weights and of its children's active weights."""
    own = sum(math.prod(spec.shape) for spec in layer.variables.values())
    return own + sum(active_parameters(child) for child in layer.child_layers())


@active_parameters.register(Execution)
def _(layer: Execution) -> int:
    return layer.p.times * all_parameters(layer)


@active_parameters.register(MixtureOfExperts)
def _(layer: MixtureOfExperts) -> int:
    used = layer.router.experts_per_token(layer.router.p) / layer.p.num_experts
    experts = active_parameters(layer.experts)
    return all_parameters(layer) - experts + round(used * experts)
