"""Context: the state of one forward pass that layers share without passing it as arguments.

A layer is a pure function of its weights and inputs. The context carries everything else: whether
the pass trains, the key of its random numbers, which layer is computing, and the auxiliary losses
and metrics that layers report.

Only this module defines ambient state. There are four scopes: the context of the current forward
pass (core/context.py), its partitioning (sharding/partitioning.py), what is recorded of it
(sharding/recording.py), and how plans are compiled (wings/planning/compiling/cache.py).
Hand-written gradients, which TensorFlow computes after the forward pass, compute under the
partitioning and for the layer of the call that they belong to; see `captured`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.repetition import Iteration

Value = TypeVar("Value")


_held_in_gradients: list[Scope] = []


class Scope(Generic[Value]):
    """A value of one type, separate for every thread.

    Args:
      default: The value outside of every `use` block.
      holds_in_gradients: Whether the value of a call holds in its hand-written gradient.
    """

    def __init__(self, name: str, default: Value, holds_in_gradients: bool = False):
        self._variable: contextvars.ContextVar[Value] = contextvars.ContextVar(
            name, default=default
        )
        if holds_in_gradients:
            _held_in_gradients.append(self)

    def get(self) -> Value:
        """Returns the value of the innermost `use` block."""
        return self._variable.get()

    @contextlib.contextmanager
    def use(self, value: Value) -> Iterator[Value]:
        """Sets the value inside a `with` block."""
        token = self._variable.set(value)
        try:
            yield value
        finally:
            self._variable.reset(token)


if TYPE_CHECKING:
    from lingvo_gshard.core.autodiff.remat_policy import SavedProducts

Metric: TypeAlias = "tuple[tf.Tensor, tf.Tensor]"
OutputObserver: TypeAlias = "Callable[[str, tf.Tensor], None]"
# Maps a layer to VariableSpecs by name.
Beside: TypeAlias = "Callable[[Any], Mapping[str, Any]]"
# Called with the layer's path, the name of its method, and what the method returned.
ResultObserver: TypeAlias = "Callable[[str, str, Any], None]"


@dataclasses.dataclass
class Context:
    """The state of one forward pass.

    Attributes:
      training: Whether the pass trains. Dropout and load balancing depend on it.
      seed: int32 [2] key of the pass's random numbers, or None if layers must not draw any.
      on_output: Called with (layer path, output) for every output that layers observe.
      on_result: Called with (layer path, method, result) after every `@layer_method`, and with
        (path, "add_loss", value) after every auxiliary loss.
      losses: Auxiliary losses by name, scalars to add to the training loss.
      loss_weights: How the losses of the parts of a batch join, by name; see `add_loss`.
      batch_weights: In a pass on a part of a batch, the sums of the weights of each loss over all
        parts. None in a pass on a whole batch.
      included: Sums of the losses that the task has added to its own loss.
      metrics: (value, weight) by name.
      sums: Tensors by name that are summed over the parts of a batch; see `add_sum`.
      layer_path: Path of the layer that is computing, empty at the root.
      iteration: Position in a compiled loop over layers, or None outside of such loops.
      extensions: What layers above the core have in the context, by class; see `extension`.
      frozen: Paths of the weights that are not trained and need no gradient.
      is_recomputing: Whether the backward pass computes the layers once more (remat).
      saved_products: Where the remat unit under way saves and restores matrix products.
      beside: In a training step, declares what it measures beside a layer's weights: maps the layer
        to declarations by name, which the layer's theta has as well.
      gathers_ahead: Whether stacked weights come split like their masters. Loops over layers gather
        the weights of the next layer while they compute one.
    """

    training: bool = False
    seed: tf.Tensor | None = None
    on_output: OutputObserver | None = None
    on_result: ResultObserver | None = None
    losses: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    loss_weights: dict[str, tf.Tensor | None] = dataclasses.field(default_factory=dict)
    batch_weights: Mapping[str, tf.Tensor] | None = None
    included: list[tf.Tensor] = dataclasses.field(default_factory=list)
    metrics: dict[str, Metric] = dataclasses.field(default_factory=dict)
    sums: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    layer_path: str = ""
    iteration: Iteration | None = None
    extensions: Mapping[type, Any] = dataclasses.field(default_factory=dict)
    frozen: Collection[str] = ()
    is_recomputing: bool = False
    saved_products: SavedProducts | None = None
    beside: Beside | None = None
    gathers_ahead: bool = False

    def random_seed(self, path: str) -> tf.Tensor:
        """Returns a key that depends only on the pass's seed and on `path`.

        Args:
          path: Path of the layer, followed by the purpose of the random numbers.

        Returns:
          An int32 [2] key for the hashed functions of core/random_numbers.py.

        Raises:
          ValueError: The pass has no seed.
        """
        if self.seed is None:
            raise ValueError(f"{path} needs random numbers, but context.scope was given no seed")
        word = self.iteration.word(path) if self.iteration else random_numbers.word(path)
        return random_numbers.hashed_fold_in_word(self.seed, word)

    def add_loss(self, path: str, value: tf.Tensor, weight: tf.Tensor | float | None = 1.0) -> None:
        """Adds a scalar to the training loss.

        The weight declares how the losses of the parts of a batch join. Micro-batches, interleaved
        parts and pipelines all obey it: the loss of the batch is the mean of the parts' losses by
        their weights, or their sum.

        Args:
          path: Name of the loss. A number is appended if the name is taken.
          value: float scalar. A compiled loop over layers adds up a vector, one entry for each
            iteration.
          weight: Number of items that the value is a mean over, such as tokens, of the value's
            shape. It has no gradient. None: the value is a sum.
        """
        name, value = _unused(path, self.losses), tf.cast(value, tf.float32)
        count = None if weight is None else tf.stop_gradient(tf.cast(weight, tf.float32))
        if count is not None and self.batch_weights is not None:
            value *= tf.math.divide_no_nan(count, self.batch_weights[name])
        self.losses[name], self.loss_weights[name] = tf.reduce_sum(value), count
        if self.on_result is not None:
            self.on_result(path, "add_loss", self.losses[name])

    def include_losses(self) -> tf.Tensor:
        """Returns the sum of the losses so far, which the caller adds to the training loss."""
        total = tf.add_n([0.0, *self.losses.values()])
        self.included.append(total)
        return total

    def add_metric(self, path: str, value: tf.Tensor, weight: tf.Tensor | float = 1.0) -> None:
        """Reports a scalar metric.

        A compiled loop over layers reports a vector with one entry per iteration, under a name that
        `repetition.unstacked` expands.

        Args:
          path: Name of the metric. A number is appended if the name is taken.
          value: float scalar.
          weight: Weight of the value in averages over steps.
        """
        pair = (tf.cast(value, tf.float32), tf.cast(weight, tf.float32))
        self.metrics[_unused(path, self.metrics)] = pair

    def add_sum(self, path: str, value: tf.Tensor) -> None:
        """Reports a float tensor that is summed over micro-batches.

        A compiled loop over layers reports a tensor whose first dimension is the iteration, under a
        name that `repetition.unstacked` expands. The tensor has no gradient.

        Args:
          path: Name of the sum. A number is appended if the name is taken.
          value: A tensor of any shape. Integers below 2^24 are exact.
        """
        value = tf.stop_gradient(tf.cast(value, tf.float32))
        self.sums[_unused(path, self.sums)] = value

    def observe(self, path: str, output: tf.Tensor) -> None:
        """Passes a layer's output to `on_output`, if the pass has one."""
        if self.on_output is not None:
            self.on_output(self.iteration.path(path) if self.iteration else path, output)

    def part(self, iteration: Iteration | None = None) -> Context:
        """Returns a copy that collects the losses, metrics and sums of a part of the pass.

        Args:
          iteration: Position of the part in a compiled loop over layers, if it is in one.
        """
        return dataclasses.replace(
            self,
            losses={},
            loss_weights={},
            batch_weights=None,
            included=[],
            metrics={},
            sums={},
            iteration=iteration,
        )


Extension = TypeVar("Extension")
_scope: Scope[Context | None] = Scope("context", None)


def current() -> Context:
    """Returns the context of the current pass, or an evaluation context outside of any pass."""
    return _scope.get() or Context()


def layer_path() -> str:
    """Returns the path of the layer that is computing, empty at the root and outside of layers."""
    return current().layer_path


def captured() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Remembers the layer that is computing, and the values of scopes that hold in gradients.

    Returns:
      A function that makes them current again inside a `with` block.
    """
    path = layer_path()
    values = [(scope, scope.get()) for scope in _held_in_gradients]

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with override(layer_path=path), contextlib.ExitStack() as stack:
            for scope, value in values:
                stack.enter_context(scope.use(value))
            yield

    return restored


@contextlib.contextmanager
def scope(
    training: bool = False, seed: tf.Tensor | None = None, on_output: OutputObserver | None = None
) -> Iterator[Context]:
    """Opens the context of one forward pass. It keeps the `on_result` of the current context.

    Args:
      seed: int32 [2] key. Layers that draw random numbers (dropout, random routing) need it.
      on_output: Called with (layer path, output) for every output that layers observe.

    Yields:
      The context, which collects the losses and metrics of the pass.
    """
    with use(Context(training, seed, on_output, current().on_result)) as context:
        yield context


@contextlib.contextmanager
def use(context: Context) -> Iterator[Context]:
    """Makes `context` the current one inside a `with` block."""
    with _scope.use(context):
        yield context


def override(**fields: Any) -> contextlib.AbstractContextManager[Context]:
    """Changes fields of the current context inside a `with` block.

    Losses and metrics that are reported inside go to the current context.
    """
    return use(dataclasses.replace(current(), **fields))


def extension(kind: type[Extension]) -> Extension:
    """Returns what layers of some kind have in the current context.

    Args:
      kind: A dataclass whose fields have defaults, such as `TokenContext` of mixtures of experts.
    """
    return current().extensions.get(kind) or kind()


def override_extension(
    kind: type[Extension], **fields: Any
) -> contextlib.AbstractContextManager[Context]:
    """Changes fields of an extension inside a `with` block."""
    changed: Any = dataclasses.replace(cast(Any, extension(kind)), **fields)
    return override(extensions={**current().extensions, kind: changed})


def _unused(path: str, taken: dict) -> str:
    """Returns the path, with a number if the layer has reported under it in this pass."""
    if path not in taken:
        return path
    return next(f"{path}_{i}" for i in range(1, len(taken) + 2) if f"{path}_{i}" not in taken)
