"""Kernel: a function with a body of jax for each platform, and its mark in a TensorFlow program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec

from lingvo_gshard.core import scopes, tf
from lingvo_gshard.core.lazy import gen_xla_ops
from lingvo_gshard.sharding import hardware_of, is_interpreted

_PREFIX = "lingvo_gshard.kernels."

# (configuration, *arrays) -> arrays, all of jax.
Body: TypeAlias = Callable[..., Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function of arrays that some platforms compute with code of their own.

    Attributes:
      name: name of the kernel, such as "attention".
      config: type of its static arguments.
      bodies: hardware, "tpu" or "cuda" -> the function of jax. With `interpret=True` it computes on
        CPUs, step by step.
    """

    name: str
    config: type[msgspec.Struct]
    bodies: Mapping[str, Body]

    def body(self, platform: str) -> Body:
        """Returns the function of jax for a platform, one of PLATFORMS."""
        found = self.bodies[hardware_of(platform)]
        return functools.partial(found, interpret=True) if is_interpreted(platform) else found

    def mark(
        self,
        config: msgspec.Struct,
        operands: Sequence[tf.Tensor],
        results: Sequence[tf.TensorSpec],
        share: float,
        read_share: float = 1.0,
    ) -> list[tf.Tensor]:
        """Returns the results of a marked call, which lowering replaces by the platform's body.

        Args:
          operands: the arrays of this device.
          results: shapes and types of the results.
          share: the share of its products that the kernel computes. The name of the operation
            carries it into the compiled program, see `FusedCall`.
          read_share: the share of its weights that the kernel reads.
        """
        with tf.name_scope(scopes.FusedCall(self.name, share, read_share).scope):
            marked = gen_xla_ops.xla_custom_call_v2(
                operands=operands,
                call_target_name=f"{_PREFIX}{self.name}",
                backend_config=msgspec.json.encode(config).decode(),
                has_side_effect=False,
                result_dtypes=[spec.dtype for spec in results],
                result_shapes=[spec.shape for spec in results],
            )
        # The generated op has no return type.
        return cast(list[tf.Tensor], marked)


_kernels: dict[str, Kernel] = {}


def register(name: str, config: type[msgspec.Struct], **bodies: Body) -> Kernel:
    """Makes a `Kernel` with bodies by hardware, which `marked` finds by its name from then on."""
    _kernels[name] = Kernel(name, config, bodies)
    return _kernels[name]


def marked(call_target: str) -> Kernel | None:
    """Returns the kernel that a custom call's target marks; None for all other custom calls."""
    if not call_target.startswith(_PREFIX):
        return None
    return _kernels[call_target.removeprefix(_PREFIX)]
