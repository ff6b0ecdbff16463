"""annotate: says by letters which dimensions a tensor has, and so how it may be split."""

from __future__ import annotations

import tensorflow as tf
from absl import logging

from lingvo_gshard.core import context
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.letters import check_layout
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import recording, xla
from lingvo_gshard.sharding.partitioning import current_partitioning


def annotate(
    tensor: tf.Tensor,
    layout: str,
    kind: str = "activations",
    unsplit: str = "",
    reserved: str = "",
) -> tf.Tensor:
    """Returns the tensor, marked as split over the mesh as the partitioning in use splits `layout`.

    What no rule splits is marked as whole: a layout is an exact statement. Without a partitioning
    (`use_partitioning`), on a mesh of one device, and outside a graph it is the identity.

    kind: 'activations', 'weights' or 'moments': whose table of letters holds.
    unsplit: letters that stay whole in this tensor.
    reserved: letters that the tensor lacks but tensors it is used with have; no dimension of it may
        take their axes.
    Raises ValueError, naming the layer that is computing, if the layout has an unknown letter or
    another rank than the tensor.
    """
    # A batch may be of NumPy arrays where nothing is compiled.
    tensor = tf.convert_to_tensor(tensor)
    result = _annotate(tensor, layout, kind, context.layer_path(), unsplit, reserved)
    if not reserved:
        recording.add(f"{layout}->{layout}", (tensor,), result, is_annotation=True)
    return result


def annotate_like(tensor: tf.Tensor, spec: VariableSpec, kind: str = "weights") -> tf.Tensor:
    """Returns the tensor, marked as the weight of that spec is, or with kind 'moments' as the
    moment.

    For weights, gradients and optimizer moments. Raises ValueError as `annotate` does.
    """
    return _annotate(tensor, spec.layout, kind, spec.path, spec.unsplit)


def annotate_weights(theta: NestedMap, specs: NestedMap, kind: str = "weights") -> NestedMap:
    """Returns a tree of weights, gradients or moments, each marked as `annotate_like` does.

    specs: as of `layer.variable_specs()`. With the weights of a layer so marked, a runtime keeps
    each in parts where its letters say so. Raises ValueError as `annotate` does.
    """
    pairs = zip(theta.flatten(), specs.flatten(), strict=True)
    return theta.pack(annotate_like(weight, spec, kind) for weight, spec in pairs)


def _annotate(
    tensor: tf.Tensor, layout: str, kind: str, path: str, unsplit: str, reserved: str = ""
) -> tf.Tensor:
    try:
        check_layout(layout, tensor.shape.rank)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from None
    current = current_partitioning()
    if current is None or current.mesh.size == 1:
        return tensor
    if tf.executing_eagerly():
        logging.log_first_n(logging.WARNING, "Nothing is split: annotations need a tf.function", 1)
        return tensor
    split = current.split(layout, kind, path, unsplit, reserved)
    return xla.tile(tensor, split, current.mesh)
