"""Measures decoding: our engine and others in alternating turns, and the device's own rates."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.decoding.precision import INT8, TRAINED
from lingvo_gshard.inference.engine.engine import Engine
from lingvo_gshard.tools.benchmarks.decode import ours, sizes
from lingvo_gshard.tools.benchmarks.decode.cases import Case
from lingvo_gshard.tools.benchmarks.decode.peer_process import CTRANSLATE2_INT8
from lingvo_gshard.tools.benchmarks.decode.peers import ENGINES, Peers
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


def measure(
    models: Mapping[str, ours.Model],
    cases: Sequence[Case],
    peers: Peers | None,
    threads: int,
    repeats: int,
    report: Callable[[str], None],
) -> Iterator[Row]:
    """Measures each case by every engine in turn.

    Args:
      models: the models that cases name.
      cases: what is decoded.
      peers: other engines; None measures ours alone.
      threads: workers of our engine.
      repeats: number of turns.
      report: called with each stage.

    Yields:
      The rows of each case when it is measured, ours first.
    """
    names = [*OURS, *(ENGINES if peers else ())]
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
                seconds = [_seconds(name, own, peers, case) for name in names]
                turns.append([*seconds, product.flops / seconds_of(product.run)])
        *engines, rates = np.array(turns).T
        flops, rate = sizes.case_flops(model.task, case), float(np.median(rates))
        for name, taken in zip(names, engines, strict=True):
            seconds = float(np.median(taken))
            yield Row(
                case.name,
                name,
                case.tokens,
                seconds,
                case.tokens / seconds,
                1.0 if name in OURS else float(np.median(taken / engines[_own_index(name)])),
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


def _own_index(name: str) -> int:
    """Returns which of OURS another engine is compared with."""
    return list(OURS).index(_INT8 if name == CTRANSLATE2_INT8 else _TRAINED)


def _seconds(name: str, own: Mapping[str, Engine], peers: Peers | None, case: Case) -> float:
    """Returns the mean seconds of decoding a case in one turn."""

    def once() -> float:
        if name in own:
            return ours.decode(own[name], case)
        assert peers
        return peers.decode(name, case)

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
