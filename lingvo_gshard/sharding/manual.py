"""Manual regions: stretches of a model that its author partitions by hand.

Between `full_to_shard` and `shard_to_full` a tensor is one device's part, shapes are per device,
and nothing is moved but by the calls of `collectives`. `manual` wraps a function in both:

    def experts(x_ECM, w_EMH):                      # E/n experts on each of n devices
        return tf.einsum("ECM,EMH->ECH", x_ECM, w_EMH)

    h_ECH = manual(experts, ["ECM", "EMH"], "ECH")(x_ECM, theta.w_in)

A split is given by letters, as the partitioning in use splits an activation of that layout, or
written out, `(("data",), (), ())`; `()` is whole. Regions are manual over all axes of the mesh:
along axes that a split does not name, every device has a copy. Without a partitioning in use, on
one device, and outside a graph this is all the identity, and the same code computes on wholes.

A region takes equal parts, so every size must divide; and what a region computes with must have
been carried into it, so a tensor from outside is made an argument (constants may be used as they
are). House layers can be called in a function given to `manual`, where annotations do nothing.
Of the two partitioners GSPMD has such regions; Shardy's are another kind, which TensorFlow has no
operations for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.sharding import scope, xla
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.strategies import Split


def manual(
    function: Callable[..., tf.Tensor | Sequence[tf.Tensor]],
    in_splits: Sequence[str | Split],
    out_splits: str | Split | list[str | Split],
) -> Callable[..., tf.Tensor | list[tf.Tensor]]:
    """Returns a function of whole tensors that computes `function` on each device's parts.

    in_splits: one for each argument. out_splits: the result's, or a list where there are several.
    Along axes that a result's split does not name, its parts must be equal on all devices.

    Raises ValueError for other than that many arguments or results, for a tensor that the function
    takes from around it, and as `full_to_shard` does.
    """

    def partitioned(*tensors: tf.Tensor) -> tf.Tensor | list[tf.Tensor]:
        _check_count(function, "argument", len(in_splits), len(tensors))
        parts = [full_to_shard(x, split) for split, x in zip(in_splits, tensors, strict=True)]
        with _inside(), _closed(function, parts):
            results = function(*parts)
        if not isinstance(out_splits, list):
            return shard_to_full(results, out_splits)
        _check_count(function, "result", len(out_splits), len(results))
        return [shard_to_full(x, split) for split, x in zip(out_splits, results, strict=True)]

    return partitioned


def full_to_shard(tensor: tf.Tensor, split: str | Split) -> tf.Tensor:
    """Returns this device's part of a whole tensor: the beginning of a manual region.

    Its gradient is summed over the devices that have copies of the part.
    Raises ValueError if a dimension does not divide into its parts, or a letter or axis is unknown.
    """
    tensor = tf.convert_to_tensor(tensor)
    region = _region_in_use()
    if region is None:
        return tensor
    split = resolve(split, tensor.shape.rank)
    for dimension, axes in enumerate(split):
        if tensor.shape[dimension] % region.parts(axes):
            raise ValueError(
                f"Manual region: dimension {dimension} of {tensor.shape} does not divide into the "
                f"{region.parts(axes)} parts of {', '.join(axes)} in --mesh={region.mesh}"
            )
    return xla.full_to_shard(tensor, split, region.mesh)


def shard_to_full(part: tf.Tensor, split: str | Split) -> tf.Tensor:
    """Returns the whole tensor of which every device has computed a part: the end of a region.

    Devices along axes that the split does not name must have equal parts.
    Raises ValueError as `full_to_shard` does.
    """
    part = tf.convert_to_tensor(part)
    region = _region_in_use()
    if region is None:
        return part
    split = resolve(split, part.shape.rank)
    shape = [size * region.parts(axes) for size, axes in zip(part.shape, split, strict=True)]
    return xla.shard_to_full(part, split, region.mesh, shape)


def resolve(split: str | Split, rank: int) -> Split:
    """Returns the split of a layout, or the written-out one; wholes where nothing is partitioned.

    Tells, also inside a region, over which axes a letter is split: `resolve("BLH", 3)[2]`.
    Raises ValueError if it is another rank's, or names an unknown letter or axis.
    """
    if len(split) != rank:
        raise ValueError(f"Manual region: {split} is no split of a tensor of rank {rank}")
    region = _region_in_use()
    if region is None:
        return ((),) * rank
    if isinstance(split, str):
        return region.split(split, "activations", context.layer_path())
    return split


def mesh_in_use() -> Mesh | None:
    """Returns the mesh that regions are manual over; None where there is but one device."""
    region = _region_in_use()
    return region and region.mesh


def _region_in_use() -> Partitioning | None:
    now = scope.current()
    region = now.manual_partitioning or now.partitioning
    if region is None or region.mesh.size == 1 or tf.executing_eagerly():
        return None
    return region


def _inside() -> contextlib.AbstractContextManager[scope.Sharding]:
    """Switches annotations off inside a `with` block and tells collectives the mesh."""
    now = scope.current()
    return scope.override(
        partitioning=None, manual_partitioning=now.manual_partitioning or now.partitioning
    )


@contextlib.contextmanager
def _closed(function: Callable, parts: Sequence[tf.Tensor]) -> Iterator[None]:
    """Refuses what is computed in it from other tensors than parts, and from no constants.

    XLA would compute on such a tensor whole, and nothing would sum its gradient over the devices.
    """
    if _region_in_use() is None:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    inside = graph.get_operations()[before:]
    known = {part.name for part in parts}
    known |= {inner.name for outer, inner in _captures(graph) if not _is_symbolic(outer)}
    known |= {tensor.name for op in inside if op.type != "Placeholder" for tensor in op.outputs}
    for op in inside:
        for tensor in op.inputs:
            if tensor.name not in known and tensor.op.type != "Const":
                raise ValueError(
                    f"manual({_name(function)}): {op.name} computes with {tensor.name}, of shape "
                    f"{tensor.shape}, which is whole; make it an argument with a split of its own"
                )


def _captures(graph: tf.Graph) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Tensors from outside of a function's graph, and what they are inside."""
    return getattr(graph, "captures", [])


def _is_symbolic(tensor: tf.Tensor) -> bool:
    return not hasattr(tensor, "numpy")


def _name(function: Callable) -> str:
    return getattr(function, "__name__", str(function))


def _check_count(function: Callable, what: str, expected: int, given: int) -> None:
    if expected != given:
        raise ValueError(f"manual({_name(function)}): {given} {what}s for {expected} splits")
