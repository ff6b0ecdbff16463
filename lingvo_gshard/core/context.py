"""Context: what holds for one forward pass, and what layers leave behind in it.

A layer is a pure function of its weights and inputs. Whether it trains, which random numbers it may
use, and the auxiliary losses and metrics it reports travel here instead of through every call.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

import tensorflow as tf

from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.repetition import Iteration

Metric = tuple[tf.Tensor, tf.Tensor]


@dataclasses.dataclass
class Context:
    """One forward pass: its mode and random key, and the losses and metrics collected in it.

    iteration: where layers are one loop, which of them it is.
    token_ids: int32 [B,L], which tokens are computed; None where nobody says.
    """

    training: bool = False
    seed: tf.Tensor | None = None
    losses: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    metrics: dict[str, Metric] = dataclasses.field(default_factory=dict)
    on_output: Callable[[str, tf.Tensor], None] | None = None
    iteration: Iteration | None = None
    token_ids: tf.Tensor | None = None

    def random_seed(self, path: str) -> tf.Tensor:
        """Returns an int32 [2] key that depends on the pass's seed and on `path` alone.

        It is for random_numbers' hashed functions.
        """
        if self.seed is None:
            raise ValueError(f"{path} needs random numbers, but context.scope was given no seed")
        word = self.iteration.word(path) if self.iteration else random_numbers.word(path)
        return random_numbers.hashed_fold_in_word(self.seed, word)

    def add_loss(self, path: str, value: tf.Tensor) -> None:
        """Adds a scalar to the training loss."""
        self.losses[_unused(path, self.losses)] = tf.cast(value, tf.float32)

    def add_metric(self, path: str, value: tf.Tensor, weight: tf.Tensor | float = 1.0) -> None:
        """Reports a scalar; over steps it is averaged by `weight`.

        Layers that are one loop report vectors, by a name that `repetition.unstacked` makes many.
        """
        pair = (tf.cast(value, tf.float32), tf.cast(weight, tf.float32))
        self.metrics[_unused(path, self.metrics)] = pair

    def observe(self, path: str, output: tf.Tensor) -> None:
        """Shows a layer's output to whoever asked to see outputs in forward order."""
        if self.on_output is not None:
            self.on_output(self.iteration.path(path) if self.iteration else path, output)

    def part(self, iteration: Iteration | None = None) -> Context:
        """Returns a context like this one that collects what a part of the pass leaves behind."""
        return dataclasses.replace(self, losses={}, metrics={}, iteration=iteration)


_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("context", default=None)


def current() -> Context:
    """Returns the context of the pass under way; outside of any, one that evaluates."""
    return _current.get() or Context()


@contextlib.contextmanager
def scope(
    training: bool = False,
    seed: tf.Tensor | None = None,
    on_output: Callable[[str, tf.Tensor], None] | None = None,
) -> Iterator[Context]:
    """Opens the context of one forward pass.

    seed: int32 [2]; needed where a layer draws random numbers (dropout, random routing).
    on_output: called with (layer path, output) for the outputs that layers observe.
    """
    with use(Context(training, seed, on_output=on_output)) as context:
        yield context


@contextlib.contextmanager
def use(context: Context) -> Iterator[Context]:
    """Makes a context that of the pass under way."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


_layer_path: contextvars.ContextVar[str] = contextvars.ContextVar("layer_path", default="")


def layer_path() -> str:
    """Returns the path of the layer that is computing; empty at the root and outside of any."""
    return _layer_path.get()


@contextlib.contextmanager
def layer(path: str) -> Iterator[None]:
    """Says that the layer of that path is computing."""
    token = _layer_path.set(path)
    try:
        yield
    finally:
        _layer_path.reset(token)


@contextlib.contextmanager
def tokens(ids_BL: tf.Tensor) -> Iterator[None]:
    """Says which tokens, by their int32 ids, layers compute."""
    with use(dataclasses.replace(current(), token_ids=ids_BL)):
        yield


_recomputing: contextvars.ContextVar[bool] = contextvars.ContextVar("recomputing", default=False)


def recomputing() -> bool:
    """Whether what layers compute was computed before, and not kept."""
    return _recomputing.get()


@contextlib.contextmanager
def recomputation() -> Iterator[None]:
    """Says that layers compute again what they have computed before."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def _unused(path: str, taken: dict) -> str:
    """The path, numbered when one layer reports more than once in a pass."""
    if path not in taken:
        return path
    return next(f"{path}_{i}" for i in range(1, len(taken) + 2) if f"{path}_{i}" not in taken)
