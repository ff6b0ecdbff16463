"""A training step of plain jax, which knows nothing of this package, over a mesh."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

ROWS, MODEL, HIDDEN, LAYERS = 32, 16, 64, 2
MESH = {"data": 4, "model": 2}
DEVICES = 8
FLOAT = 4
# Elements of one device: two products per layer, split over `model`.
WEIGHTS = LAYERS * 2 * MODEL * HIDDEN
PRODUCT = 2 * ROWS * MODEL * HIDDEN // DEVICES


def step(state, batch):
    """Returns the state after one step of momentum, and the loss."""

    def loss(params):
        x = batch["x"]
        for index, layer in enumerate(params):
            with jax.named_scope(f"block_{index}"):
                with jax.named_scope("expand"):
                    hidden = jax.nn.relu(x @ layer["w_in"])
                with jax.named_scope("contract"):
                    x = jnp.tanh(hidden @ layer["w_out"])
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "mu": moments}, value


jitted = jax.jit(step, donate_argnums=0)


def specs(mesh=None):
    """Returns the step's arguments with shardings over `mesh`, by default over no devices."""
    mesh = mesh or AbstractMesh(tuple(MESH.values()), tuple(MESH))

    def spec(shape, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def layers():
        return [
            {
                "w_in": spec((MODEL, HIDDEN), None, "model"),
                "w_out": spec((HIDDEN, MODEL), "model"),
            }
            for _ in range(LAYERS)
        ]

    return {"params": layers(), "mu": layers()}, {"x": spec((ROWS, MODEL), "data")}
