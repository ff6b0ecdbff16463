"""Task: a model with its loss and facts for commands; TaskFeature: an addition to a task."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self, TypeAlias

from lingvo_gshard.core import Seam, context, tf
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.progress import SILENT, Progress
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.data.input import Input
from lingvo_gshard.tasks.evaluation import Evaluation, EvaluationRuntime, MeanMetrics

# Name of an array of a batch -> its shape and dtype.
BatchSpecs: TypeAlias = "Mapping[str, tf.TensorSpec]"


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Facts on a task that decodes, for commands, exports and the server.

    Attributes:
      has_source: whether a text is decoded from another one, as gshard-translate does. Otherwise it
        continues its beginning, as gshard-generate does.
      beam_size: hypotheses of a search, unless the user says how many.
      is_evaluated: whether `evaluate` takes a function from texts to texts: `translate` of a
        `Translator` with a source, else `write` of a `TextGenerator`. gshard-evaluate then has the
        options of decoding.
    """

    has_source: bool
    beam_size: int = 1
    is_evaluated: bool = False


class TaskFeature(Configurable):
    """An addition to tasks. Its Params are `task.<name>`, by the name that it registers.

    Class attributes:
      HELP: describes its Params.
      REPLACES_LOSS: whether the feature has a `loss` in place of the task's.
    """

    HELP: ClassVar[str] = ""
    REPLACES_LOSS: ClassVar[bool] = False

    @property
    def is_active(self) -> bool:
        """Whether the Params ask for the feature. If not, nothing else is called."""
        raise NotImplementedError(f"{type(self).__name__} defines no is_active")

    def create(self, task: Task) -> None:
        """Adds layers to a task that has created its own."""

    def declared(self, task: Task, specs: NestedMap) -> NestedMap:
        """Returns the declarations of a task's weights.

        Args:
          specs: the declarations without the feature.
        """
        del task
        return specs

    def switch_off(self, params: Params) -> None:
        """Sets the feature's Params to values that switch it off."""
        raise NotImplementedError(f"{type(self).__name__} defines no switch_off")

    def merged(self, task: Task, theta: NestedMap) -> NestedMap:
        """Returns the weights of a task without the feature that compute what these do."""
        del task
        return theta

    def loss(
        self, task: Task, theta: NestedMap, batch: Mapping[str, tf.Tensor]
    ) -> tuple[tf.Tensor, Mapping[str, context.Metric]]:
        """Returns the loss of a batch and its metrics, in place of the task's."""
        raise NotImplementedError(f"{type(self).__name__} defines no loss")


# Features of all tasks, by the names of their Params.
TASK_FEATURES: Seam[type[TaskFeature]] = Seam("task_features")


class EvaluateTask(Protocol):
    """Scores models of one class of tasks."""

    def __call__(
        self,
        runtime: EvaluationRuntime,
        input_: Any,
        split: str,
        progress: Progress,
        **options: Any,
    ) -> Evaluation:
        """Returns the scores on a split; see `Task.evaluate`."""
        ...


# By the dotted names of the tasks' classes; those derived from a class are scored as it is.
EVALUATIONS: Seam[EvaluateTask] = Seam("evaluations")


class Task(Layer):
    """A model with its loss: what an experiment trains, evaluates, plans and benchmarks.

    A new task must define `loss`. A task of sequences also overrides `token_shape` and `id_ranges`,
    which planning and benchmarks use. Everything else has a default.

    Class attributes:
      ACTIVATION_DTYPES: types that the task can compute activations in. `step.precision` chooses
        one of them and sets it as `fprop_dtype`.
      VOCABULARIES: Params that hold the size of a vocabulary -> the input's name for it. The size
        is taken from the input where the Params leave it 0.
      EVALUATION_OPTIONS: names of the options that `evaluate` takes; gshard-evaluate has a flag of
        the same name for each.
      HAS_OUTPUT_ROWS: whether an evaluation has a row of text per example, which gshard-evaluate
        --output writes.
      DECODING: how the task decodes; None for a task that decodes nothing.
      FEATURES: seams of the features that a task of this class can have.
    """

    ACTIVATION_DTYPES: ClassVar[tuple[str, ...]] = ("float32",)
    VOCABULARIES: ClassVar[Mapping[str, str]] = {}
    EVALUATION_OPTIONS: ClassVar[tuple[str, ...]] = ()
    HAS_OUTPUT_ROWS: ClassVar[bool] = False
    DECODING: ClassVar[Decoding | None] = None
    FEATURES: ClassVar[tuple[Seam[type[TaskFeature]], ...]] = (TASK_FEATURES,)

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "fprop_dtype", "", "Activations' type; empty: of step.precision.", changes_results=False
        )
        for seam in cls.FEATURES:
            for name, feature in seam.items():
                p.define(name, feature.params(), feature.HELP)
        return p

    @functools.cached_property
    def features(self) -> dict[str, TaskFeature]:
        """The features that the Params ask for, by name."""
        names = [name for seam in self.FEATURES for name, _ in seam.items()]
        found = {name: self.p.get(name).instantiate() for name in names}
        return {name: feature for name, feature in found.items() if feature.is_active}

    @property
    def replaces_loss(self) -> bool:
        """Whether a feature has a loss in place of the task's."""
        return any(feature.REPLACES_LOSS for feature in self.features.values())

    def variable_specs(self) -> NestedMap:
        """Returns the declarations of all weights, with the features' weights."""
        specs = super().variable_specs()
        for feature in self.features.values():
            specs = feature.declared(self, specs)
        return specs

    @functools.cached_property
    def plain(self) -> Self:
        """The model without features such as adapters, which computes with `merged` weights."""
        if not self.features:
            return self
        params = self.p.copy()
        for name, feature in self.features.items():
            feature.switch_off(params.get(name))
        return params.instantiate()

    def merged(self, theta: NestedMap) -> NestedMap:
        """Returns the weights of `plain` that compute what these weights do."""
        for feature in self.features.values():
            theta = feature.merged(self, theta)
        return theta

    @classmethod
    def with_vocabulary_sizes(cls, params: Params, sizes: Mapping[str, int]) -> Params:
        """Returns a copy of the task's Params with vocabulary sizes filled in where they are 0.

        Args:
          sizes: name of a vocabulary -> number of its ids, as the input gives them.

        Raises:
          UserError: the input has no vocabulary that the task needs.
        """
        params = params.copy()
        for name, vocabulary in cls.VOCABULARIES.items():
            if params.get(name):
                continue
            if vocabulary not in sizes:
                raise UserError(
                    f"task.{name} is 0 and the input has no vocabulary {vocabulary!r} to take it "
                    f"from (it has {', '.join(sizes) or 'none'}); set task.{name}"
                )
            params.set(**{name: sizes[vocabulary]})
        return params

    @layer_method
    def loss(
        self, theta: NestedMap, batch: Mapping[str, tf.Tensor]
    ) -> tuple[tf.Tensor, Mapping[str, tuple[tf.Tensor, tf.Tensor]]]:
        """Returns the training loss of a batch and its metrics.

        Args:
          batch: name -> array, as the input makes them.

        Returns:
          The scalar loss, including losses that layers report, and metrics: name -> (value,
          weight), both scalars. Evaluation averages a metric over batches by its weight, and
          micro-batches average the loss by the weight of a metric `loss`; without it they count
          equally. The names `tokens`, `cross_entropy` and `accuracy` are shown on the console.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no loss")

    def layer_losses(self) -> tf.Tensor:
        """Returns the sum of the losses that layers reported in the current forward pass.

        A router's load-balancing loss is one. Call it after all layers have run.
        """
        return context.current().include_losses()

    def guessing_loss(self) -> float | None:
        """Returns the cross-entropy of guessing all answers evenly, in nats; None if unknown.

        Training warns if the loss stays above it.
        """
        return None

    def token_shape(self, batch: BatchSpecs) -> TokenShape:
        """Returns the positions that one forward pass on a batch computes.

        The default is one position per row, for models of examples without a sequence.
        """
        (rows,) = known_sizes(next(iter(batch.values())).shape[:1])
        return TokenShape(rows, length=1)

    def tokens(self, batch: BatchSpecs) -> int:
        """Returns the number of positions in a batch, including positions of the source."""
        shape = self.token_shape(batch)
        return shape.rows * (shape.length + shape.memory_length)

    def target_tokens(self, batch: BatchSpecs) -> int:
        """Returns the number of positions in a batch that the loss is computed at."""
        return self.token_shape(batch).tokens

    def id_ranges(self) -> Mapping[str, int]:
        """Returns the number of valid ids of each integer array of a batch: name -> size.

        Benchmarks draw random ids from these ranges. Arrays named `*segments` and `*positions`
        need no range: they are filled as for packed sentences.
        """
        return {}

    def evaluate(
        self,
        runtime: EvaluationRuntime,
        input_: Input,
        split: str,
        progress: Progress = SILENT,
        **options: Any,
    ) -> Evaluation:
        """Scores a trained model on a split, as the feature of `EVALUATIONS` for its class does.

        The default averages the metrics of `loss`.

        Args:
          input_: the input, with the vocabularies that the model was trained with.
          progress: is told each stage, and how much of it is done.
          **options: options that EVALUATION_OPTIONS names.

        Raises:
          UserError: the split is empty, or an option is wrong.
        """
        for cls in () if self.replaces_loss else type(self).__mro__:
            name = f"{cls.__module__}.{cls.__qualname__}"
            if name in EVALUATIONS:
                return EVALUATIONS[name](runtime, input_, split, progress, **options)
        if options:
            raise UserError(f"{type(self).__name__} takes no evaluation option {min(options)!r}")
        return MeanMetrics.measure(runtime, input_.evaluation_batches(split))
