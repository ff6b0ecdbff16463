"""Kinds of work in a step. Plans predict and profiles measure time by the same kinds.

products              matrix products of experts, feed-forward layers and the softmax
attention             all of attention layers, their projections included
routing and dispatch  routers, and what brings tokens to experts and back
collectives           communication between devices, whichever layer causes it
optimizer             the update of weights and optimizer state
other computation     norms, activations, embeddings, the loss
"""

from __future__ import annotations

from collections.abc import Mapping

from lingvo_gshard.core.layer import Layer, scope_name
from lingvo_gshard.hlo.operations import Operation
from lingvo_gshard.layers.attention.attention import Attention
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.layer import MixtureOfExperts
from lingvo_gshard.layers.moe.routers.router import Router
from lingvo_gshard.training.step.optimizer import SCOPE as OPTIMIZER_PHASE

PRODUCTS = "products"
ATTENTION = "attention"
ROUTING = "routing and dispatch"
COLLECTIVES = "collectives"
OPTIMIZER = "optimizer"
OTHER = "other computation"
KINDS = (PRODUCTS, ATTENTION, ROUTING, COLLECTIVES, OPTIMIZER, OTHER)

# The kind of all work in a layer; None: the work is told apart by operation.
_OF_CLASSES = {Attention: ATTENTION, Router: ROUTING, MixtureOfExperts: ROUTING, Experts: None}


def kinds_of_layers(layer: Layer) -> dict[str, str | None]:
    """Returns the name scopes of layers that have a kind of their own, with that kind."""
    found = {}
    for cls, kind in _OF_CLASSES.items():
        if isinstance(layer, cls):
            found[scope_name(layer.path)] = kind
    for child in layer.child_layers():
        found |= kinds_of_layers(child)
    return found


def kind_of(operation: Operation, layers: Mapping[str, str | None]) -> str:
    """Returns the kind of an operation, one of `KINDS`.

    Args:
      operation: the operation.
      layers: what `kinds_of_layers` returns; {} if the layers are unknown.
    """
    if operation.collective:
        return COLLECTIVES
    if operation.phase == OPTIMIZER_PHASE:
        return OPTIMIZER
    scopes = operation.layer.split("/")
    for length in range(len(scopes), 0, -1):
        scope = "/".join(scopes[:length])
        if scope in layers:
            if layers[scope]:
                return str(layers[scope])
            break
    if operation.dispatch:
        return ROUTING
    return PRODUCTS if operation.matmul_flops else OTHER
