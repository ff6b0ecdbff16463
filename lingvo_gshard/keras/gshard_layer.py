"""gshard_layer: a layer of this package, such as a mixture of experts, as a layer of Keras."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from lingvo_gshard.core import Params, UserError, VariableSpec, context
from lingvo_gshard.core.lazy import keras, tf
from lingvo_gshard.sharding import annotate_weights


def gshard_layer(params: Params, name: str | None = None, seed: int = 0, **options: Any) -> Any:
    """Returns a Keras layer that computes what a layer of this package computes.

    The Keras layer's weights keep their letters, so a strategy such as "expert" splits them.
    Auxiliary losses, such as a router's load balancing, are added to the model's loss.

    Args:
      params: the layer's Params. Its `fprop` takes x [B,L,M], and a mask [B,L] if it has one.
      seed: of the initial weights, and of the random numbers in training.
      **options: further arguments of `keras.layers.Layer`.

    Raises:
      UserError: the layer has weights that no optimizer updates.
    """
    return _layer_class()(params, name, seed, **options)


class _Inner:
    """The layer inside, out of sight of Keras, which would track its trees and lists.

    Attributes:
      weights: the Keras variables of `specs`, in order; empty until they are made.
    """

    def __init__(self, params: Params, name: str):
        """Makes the layer. Its path is the name of the Keras layer, which names its operations."""
        self.layer = params.instantiate(path=name)
        self.specs = self.layer.variable_specs()
        self.takes_mask = "mask_BL" in inspect.signature(self.layer.fprop).parameters
        self.weights: list[Any] = []
        _check_updates(self.specs.flatten(), name)


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
            self._inner = _Inner(params, self.name)
            self._seed = seed
            self._seeds = keras.random.SeedGenerator(seed)
            self.supports_masking = True

        @property
        def letters(self) -> dict[str, str]:
            pairs = zip(self._inner.weights, self._inner.specs.flatten(), strict=False)
            return {weight.path: _splittable(spec) for weight, spec in pairs}

        def build(self, input_shape: Any) -> None:
            self._inner.weights += [
                self.add_weight(
                    shape=spec.shape,
                    dtype=spec.dtype,
                    initializer=functools.partial(_initial, spec, self._seed),
                    trainable=not spec.is_frozen,
                    name=spec.path.removeprefix(f"{self.name}.").replace(".", "_"),
                )
                for spec in self._inner.specs.flatten()
            ]

        def call(self, x: Any, mask: Any = None, training: bool = False) -> Any:
            specs, weights = self._inner.specs, self._inner.weights
            theta = specs.pack([tf.convert_to_tensor(weight) for weight in weights])
            key = tf.cast(self._seeds.next(), tf.int32) if training else None
            more = []
            if self._inner.takes_mask:
                ones = tf.ones(tf.shape(x)[:2], tf.float32)
                more = [ones if mask is None else tf.cast(mask, tf.float32)]
            with context.scope(bool(training), key) as scope:
                y = self._inner.layer.fprop(annotate_weights(theta, specs), x, *more)
            for loss in scope.losses.values():
                self.add_loss(loss)
            return y

        def compute_output_spec(self, x: Any, mask: Any = None, training: bool = False) -> Any:
            return keras.KerasTensor(x.shape, self.compute_dtype)

    return GShardLayer


def _initial(spec: VariableSpec, seed: int, shape: Any, dtype: Any = None) -> tf.Tensor:
    """Returns the initial value of a weight, as Keras asks an initializer for it."""
    del shape
    return tf.cast(spec.init(tf.constant([seed, 0], tf.int32)), dtype or spec.dtype)


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
