"""Feed-forward layers, embeddings and the softmax in inference: how their weights are stored."""

from __future__ import annotations

from lingvo_gshard.core import NestedMap, layer_method, tf
from lingvo_gshard.layers import FeedForward, Softmax, TokenEmbedding
from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings.inference.layers.faces import decoding_weights
from lingvo_gshard.wings.inference.stored_weights import store


@decoding_weights.register(FeedForward)
def _(layer: FeedForward, theta: NestedMap) -> NestedMap:
    weights = NestedMap(theta)
    for name in ("in", "factor") if layer.activation.is_gated else ("in",):
        weights[f"w_{name}"] = store(theta[f"w_{name}"], "MH", "M")
    weights.w_out = store(theta.w_out, "HM", "H")
    return weights


@decoding_weights.register(TokenEmbedding)
def _(layer: TokenEmbedding, theta: NestedMap) -> NestedMap:
    """Stores the table. An id has a scale of its own in both uses."""
    del layer
    return NestedMap(table=store(theta.table, "VM", "M"))


@layer_method
def with_softmax(layer: TokenEmbedding, weights: NestedMap) -> NestedMap:
    """Returns `decoding_weights` with a transposed table for `TokenEmbedding.logits`.

    XLA for CPU would transpose the table in every step.
    """
    del layer
    return NestedMap(weights, softmax=tf.nest.map_structure(_transposed, weights.table))


def _transposed(x_VM: tf.Tensor) -> tf.Tensor:
    """Returns a table, or the scales [V,1] of its rows, as [M,V]."""
    unsplit = "M" if x_VM.shape[1] == 1 else ""
    return annotate(tf.transpose(x_VM), "MV", "weights", unsplit=unsplit)


@decoding_weights.register(Softmax)
def _(layer: Softmax, theta: NestedMap) -> NestedMap:
    del layer
    return NestedMap(w=store(theta.w, "MV", "M"))
