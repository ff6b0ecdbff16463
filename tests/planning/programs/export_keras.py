"""Exports a training step of Keras on JAX, as a process of its own, to the file it is given."""

import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import keras  # noqa: E402
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec  # noqa: E402

MESH = AbstractMesh((8,), ("data",))
MODEL = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(256, "relu", name="expand"),
        keras.layers.Dense(64, name="contract"),
    ]
)
ADAM = keras.optimizers.Adam()


def step(trainable_variables, non_trainable_variables, optimizer_variables, x):
    """Returns the variables after one step."""

    def loss(trainable):
        y, _ = MODEL.stateless_call(trainable, non_trainable_variables, x, training=True)
        return jnp.mean(y**2)

    gradients = jax.grad(loss)(trainable_variables)
    return ADAM.stateless_apply(optimizer_variables, gradients, trainable_variables)


def specs(variables):
    """Returns the shapes of variables that all devices hold."""
    return [spec(variable.shape, variable.dtype) for variable in variables]


def spec(shape, dtype, *axes):
    """Returns a shape that is split over axes."""
    sharding = NamedSharding(MESH, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


if __name__ == "__main__":
    ADAM.build(MODEL.trainable_variables)
    exported = jax.export.export(jax.jit(step, donate_argnums=(0, 2)), platforms=["tpu"])(
        specs(MODEL.trainable_variables),
        specs(MODEL.non_trainable_variables),
        specs(ADAM.variables),
        spec((32, 64), "float32", "data"),
    )
    pathlib.Path(sys.argv[1]).write_bytes(exported.serialize())
