"""Exports a training step of plain jax, split over data=4,model=2, to the file it is given."""

import pathlib
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

MODEL, HIDDEN, LAYERS, ROWS = 128, 512, 2, 64
MESH = AbstractMesh((4, 2), ("data", "model"))


def train_step(state, batch):
    """Returns the state after a step of momentum, and the loss."""

    def loss(params):
        x = batch["x"]
        for index, layer in enumerate(params):
            with jax.named_scope(f"block_{index}"):
                x = x + jax.nn.relu(x @ layer["w_in"]) @ layer["w_out"]
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu)
    return {"params": params, "mu": mu}, value


def spec(shape, *axes):
    """Returns a shape that is split over axes."""
    sharding = NamedSharding(MESH, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def layers():
    """Returns the shapes of the weights."""
    w_in, w_out = spec((MODEL, HIDDEN), None, "model"), spec((HIDDEN, MODEL), "model")
    return [{"w_in": w_in, "w_out": w_out} for _ in range(LAYERS)]


if __name__ == "__main__":
    specs = {"params": layers(), "mu": layers()}, {"x": spec((ROWS, MODEL), "data")}
    jitted = jax.jit(train_step, donate_argnums=0)
    exported = jax.export.export(jitted, platforms=[sys.argv[2]])(*specs)
    pathlib.Path(sys.argv[1]).write_bytes(exported.serialize())
