"""Precision: the types of weights and activations of a run, chosen by one name.

Some things are float32 with every precision: routing, softmax, losses, the statistics of norms,
sums of gradients over micro-batches, and the computations of optimizers. Moments are float32 unless
`moment_dtype` says otherwise.

Modules of their own add others to PRECISIONS: float16, and bfloat16 with rounded factors of
products of attention, feed-forward layers and experts.

With 16-bit activations and float32 weights, the optimizer updates master weights in float32, and
products read them in 16 bits. A strategy may split moments further than weights, as zero1 does.
Master weights are then stored and updated split like their moments, and the step begins by
gathering a copy. The factors of products are rounded to 16 bits before they are gathered, which
halves the bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from lingvo_gshard.core import NestedMap, Params, Seam, UserError, VariableSpec, names, tf
from lingvo_gshard.core.layer import TABLE
from lingvo_gshard.layers.product_rules import ProductContext, ProductRule
from lingvo_gshard.sharding import Rounding, annotate_like, current_partitioning
from lingvo_gshard.sharding.partitioning import MASTERS
from lingvo_gshard.tasks.task import Task

_PARAM = "step.precision"
_DEFAULT = "float32"
# The letter of the layers of a loop.
_LOOP = "R"


@dataclasses.dataclass(frozen=True)
class Precision:
    """The types that one name stands for.

    Attributes:
      name: the value of `step.precision`.
      activations: dtype of the activations.
      weights: dtype of the weights between steps. bfloat16 weights are rounded stochastically.
      scales_loss: whether to scale the loss, since gradients may be too small for the type.
      rounding: rounds factors of products; None leaves them as they are.
      rules: take part in the products of a pass.
    """

    name: str
    activations: str
    weights: str = "float32"
    scales_loss: bool = False
    rounding: Rounding | None = None
    rules: tuple[ProductRule, ...] = ()

    @property
    def has_master_weights(self) -> bool:
        """Whether weights are kept in float32 and products read them in 16 bits."""
        return self.weights == "float32" and self.activations != "float32"

    @property
    def table_dtype(self) -> str:
        """The type that rows of tables are rounded to; empty if they are not.

        The range of float16 is too small for gradients of tables, which are sums over many tokens.
        """
        return "" if self.scales_loss or self.activations == self.weights else self.activations

    @property
    def extensions(self) -> Mapping[type, Any]:
        """The extensions of the context of a pass in this precision."""
        return {ProductContext: ProductContext(self.rounding, self.rules, self.table_dtype)}

    def layer_weights(
        self, specs: NestedMap, theta: NestedMap, gathers_ahead: bool = False
    ) -> NestedMap:
        """Returns the weights that layers compute with, made of the weights of the state.

        A weight that is split as its master weight is, or that no partitioning splits, is the
        master weight itself.

        Args:
          gathers_ahead: whether loops gather the weights that they stack; see `context.Context`.
        """
        if not self.has_master_weights:
            return theta

        def weight_of(spec: VariableSpec, master: tf.Tensor) -> tf.Tensor:
            is_ahead = gathers_ahead and may_be_ahead(spec)
            return _gathered(spec, master, self._narrow(spec), is_ahead)

        return theta.pack(map(weight_of, specs.flatten(), theta.flatten()))

    def _narrow(self, spec: VariableSpec) -> str:
        """Returns the type that layers cast a weight to before anything else; "" if to none."""
        if spec.inputs:
            return self.activations
        return self.table_dtype if spec.role == TABLE else ""

    def typed(self, task: Params) -> Params:
        """Returns a task's Params with these types.

        Raises:
          UserError: the task's Params ask for other types, or the task does not let the types of
            its activations be chosen.
        """
        task = task.copy()
        for name, dtype in self._types(cast(type[Task], task.cls)):
            if task.get(name) not in ("", dtype):
                raise self._contradiction(name, task.get(name), dtype, "Leave it empty")
            task.set(**{name: dtype})
        return task

    def check(self, task: Task) -> None:
        """Raises ValueError naming both Params if a task was made with other types."""
        for name, dtype in self._types(type(task)):
            found = task.p.get(name) or _DEFAULT
            if found != dtype:
                advice = "Make the trainer from the task's Params"
                raise self._contradiction(name, found, dtype, advice)

    def _types(self, task: type[Task]) -> list[tuple[str, str]]:
        """Returns (hyperparameter, dtype) for the task's Params that hold a type."""
        if self.activations not in task.ACTIVATION_DTYPES:
            raise UserError(
                f"{_PARAM}={self.name!r} computes activations in {self.activations}, but "
                f"{task.__name__} only in {', '.join(task.ACTIVATION_DTYPES)}"
            )
        return [("dtype", self.weights), ("fprop_dtype", self.activations)]

    def _contradiction(self, name: str, found: str, expected: str, advice: str) -> UserError:
        return UserError(
            f"task.{name} is {found!r}, but {_PARAM}={self.name!r} needs {expected!r}. {advice}, "
            f"or choose another {_PARAM}"
        )


def may_be_ahead(spec: VariableSpec) -> bool:
    """Returns whether a loop over layers can gather a weight one layer ahead.

    It can if the weight is a factor of products and is stacked over the loop's layers.
    """
    return bool(spec.slices and spec.inputs) and spec.layout.startswith(_LOOP)


def _gathered(spec: VariableSpec, master: tf.Tensor, dtype: str, is_ahead: bool) -> tf.Tensor:
    """Returns the weight that layers read; one that a loop gathers, as its master is split."""
    current = None if tf.executing_eagerly() else current_partitioning()
    if current is None or not current.is_gathered(spec):
        return master
    if dtype:
        master = annotate_like(tf.cast(master, dtype), spec, MASTERS)
    return master if is_ahead else annotate_like(master, spec)


# The precisions by name.
PRECISIONS: Seam[Precision] = Seam("precisions")
for _precision in (
    Precision("float32", "float32"),
    Precision("bfloat16", "bfloat16"),
    Precision("bfloat16_weights", "bfloat16", weights="bfloat16"),
):
    PRECISIONS.register(_precision.name)(_precision)


def precision_names() -> list[str]:
    """Returns the names of all precisions."""
    return [name for name, _ in PRECISIONS.items()]


def get(name: str) -> Precision:
    """Returns the precision of a name. Raises ValueError with the nearest name if unknown."""
    names.check(name, precision_names(), f"{_PARAM} is {name!r}")
    return PRECISIONS[name]
