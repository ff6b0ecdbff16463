"""The devices of a mesh: real ones, or CPU devices made virtually where there are fewer."""

from __future__ import annotations

import os

import jax
import tensorflow as tf


def keep_jax_on_cpu() -> None:
    """Keeps jax off the accelerators, which TensorFlow uses, unless JAX_PLATFORMS names others.

    The local runtime computes with TensorFlow, and Orbax brings jax along. The two libraries cannot
    share a GPU's memory.
    """
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def let_jax_choose_devices() -> None:
    """Undoes `keep_jax_on_cpu`: jax uses all devices, or those that JAX_PLATFORMS names."""
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", None)


def devices_for(count: int | None, processes: int = 1) -> list[jax.Device]:
    """Returns `count` devices, of all processes together; None: all there are.

    A process that has fewer accelerators, or none, makes its share of `count` as virtual CPU
    devices, which its cores take turns for. Raises ValueError naming --mesh if that is no longer
    possible, since jax has started, or if several processes have another number of devices.
    """
    _leave_accelerators_to_jax()
    if count is not None:
        _make_virtual(max(count // processes, 1))
    devices = jax.devices()
    if count is None:
        return devices
    if len(devices) < count and processes == 1:
        devices = jax.devices("cpu")
    if len(devices) < count or (processes > 1 and len(devices) != count):
        raise ValueError(
            f"--mesh needs {count} devices, but there are {len(devices)} ({devices[0].device_kind})"
            + (f" in {processes} processes" if processes > 1 else "")
        )
    return devices[:count]


def _leave_accelerators_to_jax() -> None:
    """TensorFlow only traces here; it would take all memory of a GPU that it sees."""
    for kind in ("GPU", "TPU"):
        try:
            tf.config.set_visible_devices([], kind)
        except RuntimeError:
            return


def _make_virtual(count: int) -> None:
    """Asks for `count` CPU devices, if that can still be asked."""
    try:
        if jax.config.jax_num_cpu_devices < count:
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return
