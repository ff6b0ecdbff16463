"""Marks of tensors that move between the memory of a device and the memory of its host.

XLA calls both memories of one device its memory kinds. A move is a custom call in StableHLO that
names the kind of its result. XLA turns it into an asynchronous copy:
https://docs.jax.dev/en/latest/notebooks/host-offloading.html
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.lazy import gen_xla_ops, tf

# jax's names of the memory kinds. Pages of pinned memory stay in place, so that devices copy them.
DEVICE, HOST = "device", "pinned_host"
# XLA's name of the custom call.
MOVE = "annotate_device_placement"


def to_host(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in the memory of the host, which no operation but slicing may read.

    In eager mode this is the identity.
    """
    return _moved(tensor, HOST)


def to_device(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in the memory of the device; the inverse of `to_host`."""
    return _moved(tensor, DEVICE)


def _moved(tensor: tf.Tensor, kind: str) -> tf.Tensor:
    if tf.executing_eagerly():
        return tensor
    # Lowering makes an attribute of the configuration, which TensorFlow's operation lacks.
    moved: Any = gen_xla_ops.xla_custom_call_v2(
        operands=[tensor],
        call_target_name=MOVE,
        backend_config=kind,
        has_side_effect=False,
        result_dtypes=[tensor.dtype],
        result_shapes=[tensor.shape],
    )
    return moved[0]
