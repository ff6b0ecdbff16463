"""gshard_layer: a layer of this package, such as a mixture of experts, as a layer of Keras."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import keras, tf
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.sharding.annotate import annotate_weights


def gshard_layer(params: Params, name: str | None = None, seed: int = 0, **options: Any) -> Any:
    """Returns a Keras layer that computes what a layer of this package computes.

    Its weights have the letters of the layer, so a strategy such as "expert" splits them. Auxiliary
    losses, such as a router's load balancing, are added to the model's loss.

    Args:
      params: the layer's Params. Its `fprop` takes x [B,L,M], and a mask [B,L] if it has one.
      name: the Keras layer's name.
      seed: of the initial weights, and of the random numbers in training.
      **options: further arguments of `keras.layers.Layer`.

    Raises:
      UserError: the layer has weights that no optimizer updates.
    """
    return _layer_class()(params, name, seed, **options)


@functools.cache
def _layer_class() -> type:
    """Returns the class of the layers. Keras is imported when one is made."""

    class GShardLayer(keras.layers.Layer):
        """A Keras layer around a layer of this package.

        Attributes:
          letters: path of a weight -> the letters of its dimensions.
        """

        def __init__(self, params: Params, name: str | None, seed: int, **options: Any):
            super().__init__(name=name, **options)
            # A path names the layer in compiled programs.
            self._inner = params.instantiate(path=self.name)
            self._specs = self._inner.variable_specs()
            self._seed = seed
            self._masked = "mask_BL" in inspect.signature(self._inner.fprop).parameters
            self._seeds = keras.random.SeedGenerator(seed)
            self.supports_masking = True
            _check_updates(self._specs.flatten(), self.name)

        @property
        def letters(self) -> dict[str, str]:
            pairs = zip(self._made, self._specs.flatten(), strict=True) if self.built else ()
            return {weight.path: _splittable(spec) for weight, spec in pairs}

        def build(self, input_shape: Any) -> None:
            key = tf.constant([self._seed, 0], tf.int32)
            self._made = [
                self.add_weight(
                    shape=spec.shape,
                    dtype=spec.dtype,
                    initializer=functools.partial(_initial, spec, key),
                    trainable=not spec.is_frozen,
                    name=spec.path.removeprefix(f"{self.name}.").replace(".", "_"),
                )
                for spec in self._specs.flatten()
            ]

        def call(self, x: Any, mask: Any = None, training: bool = False) -> Any:
            theta = self._specs.pack([tf.convert_to_tensor(weight) for weight in self._made])
            key = tf.cast(self._seeds.next(), tf.int32) if training else None
            more = []
            if self._masked:
                ones = tf.ones(tf.shape(x)[:2], tf.float32)
                more = [ones if mask is None else tf.cast(mask, tf.float32)]
            with context.scope(bool(training), key) as scope:
                y = self._inner.fprop(annotate_weights(theta, self._specs), x, *more)
            for loss in scope.losses.values():
                self.add_loss(loss)
            return y

        def compute_output_spec(self, x: Any, mask: Any = None, training: bool = False) -> Any:
            return keras.KerasTensor(x.shape, self.compute_dtype)

    return GShardLayer


def _initial(spec: VariableSpec, key: tf.Tensor, shape: Any, dtype: Any = None) -> tf.Tensor:
    """Returns the initial value of a weight, as Keras asks an initializer for it."""
    del shape
    return tf.cast(spec.init(key), dtype or spec.dtype)


def _splittable(spec: VariableSpec) -> str:
    """Returns the letters of a weight. Those that no strategy may split have no name."""
    return "".join("_" if letter in spec.unsplit else letter for letter in spec.layout)


def _check_updates(specs: list[VariableSpec], name: str) -> None:
    for spec in specs:
        if spec.update_rule is not None:
            raise UserError(
                f"{name}: {spec.path} is updated by a rule of its own, not by an optimizer, which "
                "Keras does not do. Choose a router without such weights, such as TopKRouter"
            )
