"""A step of Adam for a U-Net in plain jax: convolutions, group norms, skip connections."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

WIDTHS = (32, 64, 128, 128)
ROWS, SIZE, CHANNELS, GROUPS, DEVICES = 16, 64, 4, 8, 4
DTYPE = jnp.bfloat16


def spec(shape, *axes):
    """Returns the shape of an array over four devices."""
    sharding = NamedSharding(AbstractMesh((DEVICES,), ("data",)), PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, DTYPE, sharding=sharding)


def block_specs(inner, outer):
    """Returns the weights of a residual block."""
    norms = {f"norm_{i}": spec((2, n)) for i, n in enumerate((inner, outer))}
    kernels = {f"kernel_{i}": spec((3, 3, n, outer)) for i, n in enumerate((inner, outer))}
    return norms | kernels | {"skip": spec((1, 1, inner, outer))}


def weights():
    """Returns the weights by layer."""
    found = {"first": spec((3, 3, CHANNELS, WIDTHS[0]))}
    width = WIDTHS[0]
    for level, outer in enumerate(WIDTHS):
        found[f"down_{level}"] = block_specs(width, outer)
        found[f"halve_{level}"] = spec((3, 3, outer, outer))
        width = outer
    found["middle"] = block_specs(width, width)
    for level, outer in reversed(list(enumerate(WIDTHS))):
        found[f"up_{level}"] = block_specs(width + outer, outer)
        found[f"double_{level}"] = spec((3, 3, outer, outer))
        width = outer
    return found | {"last": spec((3, 3, width, CHANNELS))}


def convolve(kernel, x, stride=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
    )


def normalize(scale_and_bias, x):
    grouped = x.reshape(*x.shape[:3], GROUPS, -1).astype(jnp.float32)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    scale = jax.lax.rsqrt(grouped.var((1, 2, 4), keepdims=True) + 1e-5)
    normal = ((grouped - mean) * scale).reshape(x.shape).astype(x.dtype)
    return normal * (1 + scale_and_bias[0]) + scale_and_bias[1]


def block(layer, x):
    y = x
    for index in range(2):
        y = jax.nn.silu(normalize(layer[f"norm_{index}"], y))
        y = convolve(layer[f"kernel_{index}"], y)
    return y + convolve(layer["skip"], x)


def model(theta, x):
    x, skipped = convolve(theta["first"], x), []
    for level in range(len(WIDTHS)):
        x = block(theta[f"down_{level}"], x)
        skipped.append(x)
        x = convolve(theta[f"halve_{level}"], x, 2)
    x = block(theta["middle"], x)
    for level in reversed(range(len(WIDTHS))):
        rows, height, width, channels = x.shape
        x = jax.image.resize(x, (rows, 2 * height, 2 * width, channels), "nearest")
        x = block(theta[f"up_{level}"], jnp.concatenate([x, skipped.pop()], -1))
        x = convolve(theta[f"double_{level}"], x)
    return convolve(theta["last"], x)


def step(state, batch):
    """Returns the state after one step of Adam, and the loss."""

    def loss(theta):
        return jnp.mean(jnp.square(model(theta, batch["noisy"]) - batch["clean"]))

    value, gradients = jax.value_and_grad(loss)(state["params"])
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], gradients)
    nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, state["nu"], gradients)
    params = jax.tree.map(
        lambda p, m, n: p - 1e-3 * m / (jnp.sqrt(n) + 1e-8), state["params"], mu, nu
    )
    return {"params": params, "mu": mu, "nu": nu}, value


def specs(rows=ROWS, size=SIZE):
    """Returns the arguments of a step for images of a size."""
    images = {name: spec((rows, size, size, CHANNELS), "data") for name in ("noisy", "clean")}
    return {name: weights() for name in ("params", "mu", "nu")}, images
