"""The functions of layers in inference. A class registers those that it needs.

    from lingvo_gshard.wings.inference.layers import infer

    @infer.register(MyLayer)
    def my_layer_infer(layer, theta, x_BLM, mask_BL):
        ...

Their operations carry the path of the layer.
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Layer, NestedMap, UserError, face, layer_method, tf
from lingvo_gshard.wings.inference.layers.cached import CacheView, Visible


@layer_method
@face
def decoding_weights(layer: Layer, theta: NestedMap) -> NestedMap:
    """Returns the weights as the layer's other functions read them, computed once from theta.

    A class without a function decodes with the weights of training.
    """
    del layer
    return theta


@layer_method
@face
def infer(layer: Layer, theta: NestedMap, *args: Any, **kwargs: Any) -> Any:
    """Returns `fprop` for inference, from `decoding_weights`.

    A class without a function calls `fprop`.
    """
    return layer.fprop(theta, *args, **kwargs)


@layer_method
@face
def extend(
    layer: Layer,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    view: CacheView,
    visible: Visible,
    cache: NestedMap | None = None,
) -> tuple[tf.Tensor, NestedMap]:
    """Returns the output [B,L,M] of new tokens of a self-attention, and the cache with them.

    Args:
      theta: `decoding_weights` of the layer.
      view: the tokens' positions and the slots that they write to.
      visible: the slots that they see with the layer's reach.
      cache: the arrays of `cache_shapes`, each a list of blocks of slots, and the arrays of
        `state_shapes`; None if the slots are the new tokens themselves.

    Raises:
      UserError: the layer's class has no function.
    """
    del theta, x_BLM, view, visible, cache
    raise _missing(layer, "extend")


@face
def cache_shapes(layer: Layer, rows: int, slots: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes [B,N,K,D] of the arrays of a self-attention's cache, by name.

    One of them is `key`, unless none has slots.

    Raises:
      UserError: the layer's class has no function.
    """
    del rows, slots
    raise _missing(layer, "cache_shapes")


@face
def state_shapes(layer: Layer, rows: int, positions: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes [B,N,...] of the arrays of the cache without slots, by name.

    They have the type float32, and what all tokens of a text so far have left. A class without a
    function has no such arrays. For a text with fewer positions, `extend` may return fewer elements
    of a dimension.

    Args:
      positions: the most positions of a text.
    """
    del layer, rows, positions
    return {}


def _missing(layer: Layer, name: str) -> UserError:
    """Returns the error of a self-attention that cannot decode."""
    cls = type(layer).__name__
    return UserError(
        f"{layer.path}: {cls} does not decode; register a function for it with "
        f"@{name}.register({cls}), where {name} is that of {__name__.rpartition('.')[0]}"
    )
