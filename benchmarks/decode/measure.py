"""Measures decoding: our engine and others in alternating turns, and the device's own rates."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from lingvo_gshard.core import NestedMap, Params, Progress, TokenShape, UserError
from lingvo_gshard.core.lazy import jax
from lingvo_gshard.data import TranslationInput
from lingvo_gshard.tasks import TokenTask, TranslationTask
from lingvo_gshard.tools.benchmarks.timing import in_turns, seconds_of
from lingvo_gshard.tools.console import Console
from lingvo_gshard.training.experiments import with_configured_vocabularies
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.inference.decoding.precision import INT8, TRAINED
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.engine.shapes import EngineOptions
from lingvo_gshard.wings.inference.loading import facts_of, make_engine
from lingvo_gshard.wings.inference.model_facts import ModelFacts
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from lingvo_gshard.wings.preparation.cleaning.normalization import Normalizer

TRANSLATION, LANGUAGE_MODEL = "translation", "language_model"

# Sentences that peers decode together. Our batches have as many rows.
BATCH_ROWS = 32
_ONE_SENTENCE_TOKENS = 32
_PROMPT, _LONG_PROMPT, _CONTINUATION = 8, 129, 64


@dataclasses.dataclass(frozen=True)
class Batch:
    """Texts that other engines decode together.

    Attributes:
      texts: ids of the sources without an end, or of prompts without the id before all texts.
      tokens: the number of tokens that every text gets, neither more nor fewer.
    """

    texts: tuple[tuple[int, ...], ...]
    tokens: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
      name: what is measured.
      model: TRANSLATION or LANGUAGE_MODEL.
      beam: hypotheses of each text; 1 is greedy decoding.
      batches: the texts.
    """

    name: str
    model: str
    beam: int
    batches: tuple[Batch, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens in all texts that are returned."""
        return sum(len(batch.texts) * batch.tokens for batch in self.batches)

    @property
    def rows(self) -> int:
        """The number of texts."""
        return sum(len(batch.texts) for batch in self.batches)


def translation_cases(sources: Sequence[Sequence[int]]) -> list[Case]:
    """Returns the cases of a translation model: all sentences in batches, and one sentence alone.

    Sentences are sorted by length, the longest first. All translations of a batch get as many
    tokens as the longest source of the batch.
    """
    ordered = sorted((tuple(ids) for ids in sources), key=len, reverse=True)
    batches = []
    for first in range(0, len(ordered), BATCH_ROWS):
        texts = tuple(ordered[first : first + BATCH_ROWS])
        batches.append(Batch(texts, len(texts[0])))
    one = min(ordered, key=lambda ids: abs(len(ids) - _ONE_SENTENCE_TOKENS))
    alone = (Batch((one,), _ONE_SENTENCE_TOKENS),)
    many = f"{len(ordered):,} sentences"
    return [
        Case(f"greedy, {many}", TRANSLATION, 1, tuple(batches)),
        Case(f"beam 4, {many}", TRANSLATION, 4, tuple(batches)),
        Case("greedy, one sentence", TRANSLATION, 1, alone),
        Case("beam 4, one sentence", TRANSLATION, 4, alone),
    ]


def language_model_cases(facts: ModelFacts) -> list[Case]:
    """Returns the cases of a language model: texts of random ids, and long prompts."""
    draw = random.Random(0)
    ids = [i for i in range(facts.vocabulary_size) if i not in (facts.bos_id, *facts.end_ids)]

    def case(name: str, rows: int, prompt: int, tokens: int) -> Case:
        # The id before all texts is one position, and the last token is never computed.
        prompt = min(prompt, facts.most_positions - 1)
        tokens = min(tokens, facts.most_positions - prompt)
        texts = tuple(tuple(draw.choices(ids, k=prompt)) for _ in range(rows))
        return Case(name.format(prompt + 1), LANGUAGE_MODEL, 1, (Batch(texts, tokens),))

    found = []
    for rows in (1, BATCH_ROWS):
        found.append(case(f"language model, batch {rows}", rows, _PROMPT, _CONTINUATION))
    for rows in (1, BATCH_ROWS):
        found.append(case(f"prompt of {{}} tokens, batch {rows}", rows, _LONG_PROMPT - 1, 1))
    return found


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with weights, and what the host knows of it."""

    task: TokenTask
    theta: NestedMap
    facts: ModelFacts

    def engine(self, workers: int, precision: str = TRAINED) -> Engine:
        """Returns an engine with so many threads, in a precision of wings/inference/decoding."""
        options = EngineOptions(workers=workers, exact=True)
        return make_engine(self.task, self.theta, self.facts, options=options, precision=precision)


def initial_model(experiment: Params, positions: int | None = None) -> Model:
    """Returns the model of an experiment with its initial weights.

    By default, a text of a language model is as long as a training row.

    Raises:
      UserError: the experiment's task decodes nothing.
    """
    task = with_configured_vocabularies(experiment).instantiate()
    facts = facts_of(task, experiment.input, positions)
    theta = task.init(0).transform(lambda weight: weight.numpy())
    return Model(task, theta, facts)


def requests(case: Case, facts: ModelFacts) -> list[Request]:
    """Returns the requests of a case. Every text gets exactly the tokens of its batch."""
    found = []
    for batch in case.batches:
        options = DecodingOptions(
            beam_size=case.beam, most_tokens=batch.tokens, least_tokens=batch.tokens
        )
        for text in batch.texts:
            if facts.has_source:
                request = Request((*text, facts.end_ids[0]), (facts.bos_id,), options)
            else:
                request = Request((), (facts.bos_id, *text), options)
            found.append(request)
    return found


def decode(engine: Engine, case: Case) -> float:
    """Decodes all texts of a case and returns the seconds."""
    asked = requests(case, engine.facts)
    started = time.perf_counter()
    answers = [answer.result() for answer in engine.submit_all(asked)]
    seconds = time.perf_counter() - started
    for request, (best, *_) in zip(asked, answers, strict=True):
        # Both include the end, which the last token may be.
        found, wanted = len(best.log_probabilities), request.options.most_tokens
        assert found == wanted, f"{found} tokens instead of {wanted}"
    return seconds


# Our engine with each precision.
_TRAINED, _INT8 = "lingvo_gshard", "lingvo_gshard int8"
OURS = {_TRAINED: TRAINED, _INT8: INT8}
_MOST_WARM_UP_TURNS = 20
# A turn decodes a short case this many times, so that the turn takes about as long as for others.
_SHORT_CASE_REPEATS = 40


@dataclasses.dataclass
class DecodingTiming:
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
      limit_share: flops / seconds / rate. For several texts, the rate is the FLOP/s of a product of
        two matrices; for one text, of a vector with a matrix of the weights' size.
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
    models: Mapping[str, Model],
    cases: Sequence[Case],
    others: OtherEngines | None,
    threads: int,
    repeats: int,
    progress: Progress,
) -> Iterator[DecodingTiming]:
    """Measures each case by every engine in turn.

    Yields:
      The rows of a case as soon as the case is measured, our rows first.
    """
    precisions = others.engines if others else {}
    for case in cases:
        model = models[case.model]
        with contextlib.ExitStack() as stack:
            own = {
                name: stack.enter_context(model.engine(threads, precision))
                for name, precision in OURS.items()
            }
            product, operations = _product(model, case)
            progress.begin(f"{case.name}: preparing")
            for engine in own.values():
                _warm_up(engine, case)
            decoders = {name: functools.partial(decode, engine) for name, engine in own.items()}
            if others:
                decoders |= {name: functools.partial(others.decode, name) for name in precisions}
            clocks = [functools.partial(_seconds, each, case) for each in decoders.values()]
            clocks.append(functools.partial(seconds_of, product))
            *engines, products = in_turns(clocks, repeats, progress, case.name)
        flops, rate = case_flops(model.task, case), float(np.median(operations / products))
        times = dict(zip(decoders, engines, strict=True))
        ours = {precision: times[name] for name, precision in OURS.items()}
        for name, taken in times.items():
            seconds = float(np.median(taken))
            yield DecodingTiming(
                case.name,
                name,
                case.tokens,
                seconds,
                case.tokens / seconds,
                1.0 if name in OURS else float(np.median(taken / ours[precisions[name]])),
                flops,
                flops / seconds / rate,
            )


def _warm_up(engine: Engine, case: Case) -> None:
    """Decodes a case until two turns in a row compile no program.

    One turn is not enough, since another turn may need other programs.
    """
    idle = 0
    for _ in range(_MOST_WARM_UP_TURNS):
        before = engine.executables.count
        decode(engine, case)
        idle = idle + 1 if engine.executables.count == before else 0
        if idle == 2:
            return


def _seconds(decoder: Callable[[Case], float], case: Case) -> float:
    """Returns the mean seconds of decoding a case in one turn."""
    count = _SHORT_CASE_REPEATS if case.rows == 1 else 1
    return float(np.mean([decoder(case) for _ in range(count)]))


def _product(model: Model, case: Case) -> tuple[Callable[[], None], int]:
    """Returns the product whose rate limits a case, and its operations; see `DecodingTiming`."""
    if case.rows > 1:
        rows, inner, columns = 1024, 1024, 1024
    else:
        rows, inner = 1, model.task.p.model_dim
        columns = max(active_parameters(model.task) // inner, 1)
    x = jax.numpy.ones((rows, inner), jax.numpy.float32)
    w = jax.numpy.ones((inner, columns), jax.numpy.float32)
    compiled = jax.jit(jax.numpy.matmul).lower(x, w).compile()
    # One call must take much longer than the clock's resolution.
    times = 10 if case.rows > 1 else 100

    def run() -> None:
        for _ in range(times):
            compiled(x, w).block_until_ready()

    run()
    return run, times * 2 * rows * inner * columns


def case_flops(task: TokenTask, case: Case) -> int:
    """Returns the operations that decoding needs at least: products of every token once.

    A source is encoded once for all of its hypotheses.
    """
    total = 0
    for batch in case.batches:
        for text in batch.texts:
            if isinstance(task, TranslationTask):
                source = len(text) + 1
                encoder = flops(task.encoder, TokenShape(1, source))
                shape = TokenShape(1, batch.tokens, source)
                decoder = flops(task, shape) - encoder
                total += encoder + case.beam * decoder
            else:
                length = len(text) + batch.tokens
                softmax = 2 * task.p.model_dim * task.p.vocabulary_size
                # Of a prompt only the last position has logits.
                total += flops(task, TokenShape(1, length)) - len(text) * softmax
    return total


# Positions of a text of the language model: room for the longest prompt and its continuation.
_POSITIONS = 256


def show_row(console: Console, row: DecodingTiming) -> None:
    """Prints a row as soon as it is measured."""
    console.print(f"{row.case}, {row.engine}: {row.tokens_per_second:,.0f} tokens/s")


def make_cases(
    translation: Params, language_model: Params, sentences: int
) -> tuple[dict[str, Model], list[Case]]:
    """Returns the models by name, and what is decoded with them."""
    model = initial_model(translation)
    found = translation_cases(test_sources(translation, sentences, model.facts.most_source - 1))
    other = initial_model(language_model, _POSITIONS)
    models = {TRANSLATION: model, LANGUAGE_MODEL: other}
    return models, found + language_model_cases(other.facts)


def test_sources(experiment: Params, count: int, room: int) -> list[list[int]]:
    """Returns the ids of a fixed random choice of test sentences, without the ends.

    Sentences are cut to `room` ids. If there are fewer than `count`, all are returned.
    """
    input_ = experiment.input.instantiate()
    if not isinstance(input_, TranslationInput):
        raise UserError(f"--experiment={experiment.name} is not for translation")
    rows, normal = input_.rows("test"), Normalizer()
    chosen = random.Random(0).sample(rows, min(count, len(rows)))
    encoded = input_.source_vocabulary.encode_batch([normal(row.source) for row in chosen])
    return [ids[:room] for ids in encoded if ids]


def print_table(console: Console, rows: list[DecodingTiming]) -> None:
    """Prints the rows."""
    caption = (
        "ratio: our speed to this engine's, int8 to int8; limit: share of the rate of a float32 "
        "matrix product"
    )
    cells = [
        (
            row.case if row.engine == next(iter(OURS)) else "",
            row.engine,
            f"{row.tokens_per_second:,.0f}",
            f"{row.seconds * 1e3:,.1f}",
            "" if row.engine in OURS else f"{row.ratio:.2f}",
            f"{row.limit_share:.1%}",
        )
        for row in rows
    ]
    console.print_rows(("case", "engine"), ("tokens/s", "ms", "ratio", "limit"), cells, caption)
