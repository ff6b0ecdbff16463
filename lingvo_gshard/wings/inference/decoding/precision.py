"""Precisions: how the weights of a model are stored and multiplied in decoding."""

from __future__ import annotations

from lingvo_gshard.core import Layer, NestedMap, context, names
from lingvo_gshard.wings.inference.layers import decoding_weights
from lingvo_gshard.wings.inference.stored_weights import INT8, INT8_WEIGHTS, StoredPrecision

# Decodes in the precision of training. stored_weights.py defines INT8 and INT8_WEIGHTS.
TRAINED = "trained"
PRECISIONS = (TRAINED, INT8, INT8_WEIGHTS)


def check_precision(precision: str) -> None:
    """Raises ValueError with the nearest valid name if a precision is unknown."""
    names.check(precision, PRECISIONS, f"`precision={precision}` is unknown")


def stored_weights(model: Layer, theta: NestedMap, precision: str) -> NestedMap:
    """Returns the weights that a model decodes with, in one of PRECISIONS.

    Norms, routers, biases and positions stay as they are; so do the products of attention.
    """
    stored = "" if precision == TRAINED else precision
    with context.scope(training=False), context.override_extension(StoredPrecision, name=stored):
        return decoding_weights(model, theta)
