"""Measures decoding: our engine and others in alternating turns, and the device's own rates."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.lazy import jax
from lingvo_gshard.decoding.precision import INT8, TRAINED
from lingvo_gshard.inference.engine.engine import Engine
from lingvo_gshard.tasks.token_task import TokenTask
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.tools.benchmarks.decode import ours
from lingvo_gshard.tools.benchmarks.decode.cases import Case
from lingvo_gshard.tools.benchmarks.timing import seconds_of

# Our engine with each precision.
_TRAINED, _INT8 = "lingvo_gshard", "lingvo_gshard int8"
OURS = {_TRAINED: TRAINED, _INT8: INT8}
_MOST_WARM_UP_TURNS = 20
# A turn on a short case decodes it this often, for about as long as one of the other cases.
_SHORT_CASE_REPEATS = 40


@dataclasses.dataclass
class Row:
    """A case decoded by one engine.

    Attributes:
      case: what is decoded.
      engine: one of OURS or the name of another engine.
      tokens: generated tokens of the texts that are returned.
      seconds: median time.
      tokens_per_second: tokens / seconds.
      ratio: our speed relative to this engine's, the median over turns: in int8 if the engine
        computes in int8; 1 for ours.
      flops: operations that the case needs at least.
      limit_share: flops / seconds / rate. The rate, in FLOP/s, is that of a matrix product for
        several texts, and that of a vector with a matrix of the weights' size for one text.
    """

    case: str
    engine: str
    tokens: int
    seconds: float
    tokens_per_second: float
    ratio: float
    flops: int
    limit_share: float


class OtherEngines(Protocol):
    """Engines of other libraries, which decode the same cases.

    Attributes:
      engines: the precision of ours that each is compared with, by name.
    """

    @property
    def engines(self) -> Mapping[str, str]: ...

    def decode(self, engine: str, case: Case) -> float:
        """Decodes all texts of a case and returns the seconds."""
        ...


def measure(
    models: Mapping[str, ours.Model],
    cases: Sequence[Case],
    others: OtherEngines | None,
    threads: int,
    repeats: int,
    report: Callable[[str], None],
) -> Iterator[Row]:
    """Measures each case by every engine in turn.

    Args:
      models: the models that cases name.
      cases: what is decoded.
      others: other engines; None measures ours alone.
      threads: workers of our engine.
      repeats: number of turns.
      report: called with each stage.

    Yields:
      The rows of each case when it is measured, ours first.
    """
    precisions = others.engines if others else {}
    names = [*OURS, *precisions]
    for case in cases:
        model = models[case.model]
        with contextlib.ExitStack() as stack:
            own = {
                name: stack.enter_context(model.engine(threads, precision))
                for name, precision in OURS.items()
            }
            product = _product(model, case)
            turns = []
            report(f"{case.name}: preparing")
            for engine in own.values():
                _warm_up(engine, case)
            for turn in range(repeats):
                report(f"{case.name}: turn {turn + 1} of {repeats}")
                seconds = [_seconds(name, own, others, case) for name in names]
                turns.append([*seconds, product.flops / seconds_of(product.run)])
        *engines, rates = np.array(turns).T
        flops, rate = case_flops(model.task, case), float(np.median(rates))
        for name, taken in zip(names, engines, strict=True):
            seconds = float(np.median(taken))
            yield Row(
                case.name,
                name,
                case.tokens,
                seconds,
                case.tokens / seconds,
                1.0 if name in OURS else _ratio(taken, engines, precisions[name]),
                flops,
                flops / seconds / rate,
            )


def _warm_up(engine: Engine, case: Case) -> None:
    """Decodes a case until two turns in a row compile no program; turns need different ones."""
    idle = 0
    for _ in range(_MOST_WARM_UP_TURNS):
        before = engine.executables.count
        ours.decode(engine, case)
        idle = idle + 1 if engine.executables.count == before else 0
        if idle == 2:
            return


def _ratio(taken: np.ndarray, engines: Sequence[np.ndarray], precision: str) -> float:
    """Returns our speed in a precision relative to that of an engine, the median over turns."""
    return float(np.median(taken / engines[list(OURS.values()).index(precision)]))


def _seconds(
    name: str, own: Mapping[str, Engine], others: OtherEngines | None, case: Case
) -> float:
    """Returns the mean seconds of decoding a case in one turn."""

    def once() -> float:
        if name in own:
            return ours.decode(own[name], case)
        assert others
        return others.decode(name, case)

    count = _SHORT_CASE_REPEATS if case.rows == 1 else 1
    return float(np.mean([once() for _ in range(count)]))


@dataclasses.dataclass(frozen=True)
class _Product:
    """A compiled product of two matrices.

    Attributes:
      run: computes it and waits for the result.
      flops: its operations.
    """

    run: Callable[[], object]
    flops: int


def _product(model: ours.Model, case: Case) -> _Product:
    """Returns the product whose rate limits a case; see `Row`."""
    if case.rows > 1:
        rows, inner, columns = 1024, 1024, 1024
    else:
        rows, inner = 1, model.task.p.model_dim
        columns = max(model.task.active_parameters() // inner, 1)
    x = jax.numpy.ones((rows, inner), jax.numpy.float32)
    w = jax.numpy.ones((inner, columns), jax.numpy.float32)
    compiled = jax.jit(jax.numpy.matmul).lower(x, w).compile()
    # One call must take much longer than the clock's resolution.
    times = 10 if case.rows > 1 else 100

    def run() -> None:
        for _ in range(times):
            compiled(x, w).block_until_ready()

    run()
    return _Product(run, times * 2 * rows * inner * columns)


def case_flops(task: TokenTask, case: Case) -> int:
    """Returns the operations that decoding needs at least: products of every token once.

    A source is encoded once for all of its hypotheses. Attention counts half of the positions of
    the finished text, the mean number of those before a token.
    """
    total = 0
    for batch in case.batches:
        for text in batch.texts:
            if isinstance(task, TranslationTask):
                source = len(text) + 1
                encoder = task.encoder.flops(TokenShape(1, source))
                shape = TokenShape(1, batch.tokens, source)
                decoder = task.flops(shape) - encoder - _later_positions(task, batch.tokens)
                total += encoder + case.beam * decoder
            else:
                length = len(text) + batch.tokens
                softmax = 2 * task.p.model_dim * task.p.vocabulary_size
                # Of a prompt only the last position has logits.
                total += task.flops(TokenShape(1, length)) - len(text) * softmax
                total -= _later_positions(task, length)
    return total


def _later_positions(task: TokenTask, length: int) -> int:
    """Returns the operations of attention to the positions after each token."""
    attention = 2 * 2 * length * length * task.p.model_dim * task.decoder.p.num_layers
    return attention // 2
