"""annotate: declares the dimensions of a tensor by letters, which determine how it is split."""

from __future__ import annotations

import functools
import logging
from typing import cast

from lingvo_gshard.core import NestedMap, VariableSpec, context, tf
from lingvo_gshard.core.letters import check_layout
from lingvo_gshard.sharding import recording, xla
from lingvo_gshard.sharding.partitioning import MASTERS, current_partitioning

_log = logging.getLogger(__name__)


def annotate(
    tensor: tf.Tensor, layout: str, kind: str = "activations", unsplit: str = "", reserved: str = ""
) -> tf.Tensor:
    """Annotates a tensor with the split of its layout under the current partitioning.

    The annotation is exact: XLA replicates dimensions that no rule splits. Without
    a partitioning (see `use_partitioning`), on a mesh of one device, and in eager mode this is the
    identity.

    Args:
      layout: One letter for each dimension, or "_" for a dimension without a name.
      kind: "activations", "weights" or "moments" (of the optimizer). Selects the strategy's table.
      unsplit: Letters that are not split in this tensor.
      reserved: Letters that this tensor lacks but that tensors combined with it have. Their mesh
        axes are not used here.

    Raises:
      ValueError: The layout has an unknown letter or another rank than the tensor. The message
        names the layer that is computing.
    """
    # In eager mode a batch may consist of NumPy arrays.
    tensor = tf.convert_to_tensor(tensor)
    result = _annotate(tensor, layout, kind, context.layer_path(), unsplit, reserved)
    if not reserved:
        recording.add(f"{layout}->{layout}", (tensor,), result, is_annotation=True)
    return result


def annotate_like(tensor: tf.Tensor, spec: VariableSpec, kind: str = "weights") -> tf.Tensor:
    """Annotates a weight, a gradient or an optimizer moment with the split of a weight.

    Args:
      tensor: A tensor with the layout of the weight.
      kind: "weights", "moments" (of the optimizer) or "masters"; see `Partitioning.split`.

    Raises:
      ValueError: The ranks differ.
    """
    return _annotate(tensor, spec.layout, kind, spec.path, spec.unsplit)


def annotate_weights(theta: NestedMap, specs: NestedMap, kind: str = "weights") -> NestedMap:
    """Annotates a tree of weights, gradients or optimizer moments.

    Args:
      specs: The weights, as `layer.variable_specs()` returns them.
      kind: As in `annotate_like`.

    Raises:
      ValueError: The trees differ, or a tensor and its spec differ in rank.
    """
    pairs = zip(theta.flatten(), specs.flatten(), strict=True)
    return theta.pack(annotate_like(weight, spec, kind) for weight, spec in pairs)


def _annotate(
    tensor: tf.Tensor, layout: str, kind: str, path: str, unsplit: str, reserved: str = ""
) -> tf.Tensor:
    try:
        check_layout(layout, len(tensor.shape))
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from None
    current = current_partitioning()
    if current is None or current.mesh.size == 1:
        return tensor
    if tf.executing_eagerly():
        _warn_of_eager_mode()
        return tensor
    shape = None if kind == "activations" else cast("list[int]", tensor.shape.as_list())
    if kind == MASTERS and shape is not None:
        kind = current.kind_of_masters(layout, shape, path, unsplit)
    split = current.split(layout, kind, path, unsplit, reserved, shape)
    if kind == "moments" and shape is not None:
        # Moments that are stored whole are updated whole: else the step would gather each of them.
        split = current.state_split(shape, split)
    return xla.tile(tensor, split, current.mesh)


@functools.cache
def _warn_of_eager_mode() -> None:
    """Warns once."""
    _log.warning("Annotations have no effect in eager mode. Use a tf.function to split tensors.")
