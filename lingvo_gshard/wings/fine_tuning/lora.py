"""The adapters of a task, and which weights have them."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import Layer, NestedMap, Params, UserError, VariableSpec, tf
from lingvo_gshard.sharding import annotate_like, weight_patterns
from lingvo_gshard.tasks import TASK_FEATURES, Task, TaskFeature
from lingvo_gshard.wings.fine_tuning.adapters import CHILD, Adapters, is_factor, merged


class LoRA(TaskFeature):
    """The weights with adapters, and the adapters' size. All other weights are frozen.

    `step.optimizer.learning_rate_factors` trains more weights, such as {"*norm": 1.0}.
    """

    HELP = "Low-rank adapters, which are trained in place of the weights."
    _are_created = False

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("rank", 0, "Rank of the adapters; 0: the model has none.", minimum=0)
        p.define("alpha", 0.0, "An adapter's product is times alpha / rank; 0: times 1.", minimum=0)
        p.define(
            "weights", ("*.w_query", "*.w_value"), "Patterns of paths of weights with adapters."
        )
        p.define_fraction(
            "input_dropout", 0.0, "Share of the adapters' inputs that is dropped in training."
        )
        return p

    @classmethod
    def scale(cls, params: Params) -> float:
        """Returns the factor of the adapters' products."""
        return params.alpha / params.rank if params.alpha and params.rank else 1.0

    @property
    def is_active(self) -> bool:
        """Whether the task has adapters."""
        return self.p.rank > 0

    def declared(self, task: Task, specs: NestedMap) -> NestedMap:
        """Returns the declarations of the weights, with adapters. All others are frozen."""
        if not self._are_created:
            # Set first: `adapt` reads the declarations of the weights without adapters.
            self._are_created = True
            adapt(task, self.p, "task.lora")
            specs = Layer.variable_specs(task)
        return specs.transform(
            lambda spec: dataclasses.replace(spec, is_frozen=not is_factor(spec.path))
        )

    def switch_off(self, params: Params) -> None:
        """Sets Params of these to have no adapters."""
        params.rank = 0

    def merged(self, task: Task, theta: NestedMap) -> NestedMap:
        """Returns weights without adapters, each adapted weight merged with its adapter."""
        scale = self.scale(self.p)

        def merge(
            spec: VariableSpec, equation: str, a: tf.Tensor, b: tf.Tensor, weight: tf.Tensor
        ) -> tf.Tensor:
            total = tf.cast(weight, tf.float32) + scale * tf.einsum(equation, a, b)
            return annotate_like(tf.cast(total, spec.dtype), spec)

        return merged(task.variable_specs(), theta, merge)


TASK_FEATURES.register("lora")(LoRA)


def adapt(model: Layer, params: Params, where: str) -> None:
    """Adds adapters to the layers of a model. `where` is the path of the Params, for messages.

    Raises:
      UserError: a pattern matches no weight that can have an adapter.
    """
    patterns = params.weights
    if isinstance(patterns, str) or not patterns:
        raise UserError(f"{where}.weights is {patterns!r}; a tuple of patterns was expected")
    # Those of the layers: the task's declarations freeze what has no adapter.
    specs = Layer.variable_specs(model)
    weight_patterns.check(f"{where}.weights", patterns, specs)
    can = [spec for spec in specs.flatten() if spec.inputs and not spec.is_frozen]
    chosen: set[str] = set()
    for pattern in patterns:
        found = [spec.path for spec in can if weight_patterns.matches(pattern, spec)]
        if not found:
            raise UserError(
                f"{where}.weights: {pattern!r} matches no weight that activations are multiplied "
                f"with. {weight_patterns.nearest(pattern, [spec.path for spec in can])}"
            )
        chosen.update(found)
    options = Adapters.params().set(
        rank=params.rank,
        scale=LoRA.scale(params),
        dropout_rate=params.input_dropout,
        dtype="float32",
    )
    for layer in list(model.all_layers()):
        weights = {n: s for n, s in layer.variables.items() if s.path in chosen}
        if weights:
            layer.create_child(CHILD, options)
            for name, spec in weights.items():
                getattr(layer, CHILD).add(name, spec)
