"""ActivationCall: the elementwise functions between two products, for the bodies of kernels."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.layers import feed_forward

# The functions of layers/feed_forward.py, by their names, for float32 arrays of jax.
_FUNCTIONS: dict[str, Any] = {
    "relu": lambda h: jax.nn.relu(h),
    "squared_relu": lambda h: jnp.square(jax.nn.relu(h)),
    # Kernels for TPUs have erf, and not erfc, which jax.nn takes.
    "gelu": lambda h: 0.5 * h * (1.0 + jax.lax.erf(h * 2.0**-0.5)),
    "gelu_tanh": lambda h: jax.nn.gelu(h, approximate=True),
    "silu": lambda h: jax.nn.silu(h),
    "tanh": lambda h: jnp.tanh(h),
    "sigmoid": lambda h: jax.nn.sigmoid(h),
    "linear": lambda h: h,
}


class ActivationCall(msgspec.Struct, frozen=True):
    """An activation with the Params of layers/feed_forward.py, of one array or two if gated."""

    activation: str
    gate_alpha: float
    gate_limit: float
    gate_offset: float

    def __call__(self, *hidden: Any) -> Any:
        """Returns the activated array, in the type of the hidden arrays. It is computed in float32.

        Args:
          *hidden: an array of jax; if the activation is gated, the factor is the second one.
        """
        return self._compute(*(h.astype(jnp.float32) for h in hidden)).astype(hidden[0].dtype)

    def with_gradient(self, d_activated: Any, *hidden: Any) -> tuple:
        """Returns the gradient of each hidden array, and the activated one, in float32.

        Args:
          d_activated: float32, the gradient of the activated array.
          *hidden: as in `__call__`.
        """
        activated, gradient = jax.vjp(self._compute, *(h.astype(jnp.float32) for h in hidden))
        return *cast(tuple, gradient(d_activated)), activated

    def _compute(self, h: Any, factor: Any = None) -> Any:
        if self.activation == feed_forward.CLAMPED:
            h = jnp.minimum(h, self.gate_limit)
            factor = jnp.clip(factor, -self.gate_limit, self.gate_limit) + self.gate_offset
            return h * jax.nn.sigmoid(self.gate_alpha * h) * factor
        activated = _FUNCTIONS[feed_forward.GATES.get(self.activation, self.activation)](h)
        return activated if factor is None else activated * factor
