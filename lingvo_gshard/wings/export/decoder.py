"""PortableDecoder: what the formats that decode have in common.

The engine in inference/ steers its programs from the host and lets texts enter at any time. A
program that runs elsewhere has no such host. So here all texts enter at once, and a call returns
when the last one has ended. Both are made of the same parts of decoding/.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from lingvo_gshard.core import NestedMap, Params, UserError, VariableSpec, known_sizes, shapes, tf
from lingvo_gshard.data import Input, Vocabulary
from lingvo_gshard.tasks import Task, TokenTask
from lingvo_gshard.wings.inference.decoding.precision import (
    TRAINED,
    check_precision,
    stored_weights,
)
from lingvo_gshard.wings.inference.decoding.selection import top_few
from lingvo_gshard.wings.inference.decoding.state import (
    IMPOSSIBLE,
    SearchKind,
    StateShape,
    state_specs,
)
from lingvo_gshard.wings.inference.decoding.steps import OPTION_LEAVES, Admission, Steps
from lingvo_gshard.wings.inference.loading import facts_of
from lingvo_gshard.wings.inference.model_facts import NO_TOKEN, ModelFacts, usual_tokens
from lingvo_gshard.wings.inference.options import DecodingOptions

LOCAL_LETTERS = {
    "a": "texts that enter together",
    "c": "ways to end a hypothesis in a step",
    "e": "ids that end a text",
    "i": "steps of one call",
    "p": "positions of given tokens",
}


@dataclasses.dataclass(frozen=True)
class DecodeFunction:
    """Searches for the answers to a batch of texts, greedily or by beam search."""

    task: TokenTask
    facts: ModelFacts
    options: DecodingOptions

    @property
    def longest(self) -> int:
        """The largest number of ids of a text. Longer texts must be cut before the call."""
        if self.facts.has_source:
            return self.facts.most_source
        positions = self.facts.most_positions
        return positions - (self.options.most_tokens or (positions + 1) // 2) + 1

    def most_new(self, length: int) -> int:
        """Returns the largest number of new ids of a batch whose texts have `length` ids."""
        usual = usual_tokens(length) if self.facts.has_source else 0
        wanted = self.options.most_tokens or usual
        return min(wanted or self.facts.most_positions, self.facts.most_positions)

    def run(self, weights: NestedMap, ids_BK: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the new ids [B,L], padded after their end, and the score [B] of each answer.

        Args:
          weights: `decoding_weights` of the task.
          ids_BK: int32 ids, `facts.pad_id` in padding on the right. To translate a sentence: the
            ids of the sentence, then the end of text. To continue a text: the id before all texts,
            then the ids of the text. A row of padding has no answer, and the score 0.
        """
        rows, length = known_sizes(ids_BK.shape)
        most = self.most_new(length)
        kind = self.options.kind
        state = self._admit(weights, ids_BK, self._shape(ids_BK.shape))
        state.is_active_B *= tf.cast(tf.not_equal(ids_BK[:, 0], self.facts.pad_id), tf.int32)
        steps = Steps(self.task, kind, self.facts.end_ids, most)
        nobody = rows + 1
        state, records = steps.run(weights, state, tf.constant(most), tf.constant(nobody))
        if kind.beam > 1:
            return _best_hypothesis(records, state.generated_B, self.facts.pad_id)
        return _only_hypothesis(records, state.generated_B, self.facts)

    def _shape(self, sizes: tf.TensorShape) -> StateShape:
        """Returns the sizes of the state of a batch of ids."""
        rows, length = known_sizes(sizes)
        if self.facts.has_source:
            positions = self.most_new(length) + len(self.facts.forced_ids)
            return StateShape(rows, positions, length)
        return StateShape(rows, min(length - 1 + self.most_new(length), self.facts.most_positions))

    def _admit(self, weights: NestedMap, ids_BK: tf.Tensor, shape: StateShape) -> NestedMap:
        """Returns the state before the first step, with a text in each row."""
        kind, facts, options = self.options.kind, self.facts, self.options
        specs = state_specs(
            self.task, kind, shape, facts.vocabulary_size, self.task.activation_dtype
        )
        state = specs.transform(lambda spec: tf.zeros(spec.shape, spec.dtype))
        is_token_BK = tf.not_equal(ids_BK, facts.pad_id)
        count_B = tf.reduce_sum(tf.cast(is_token_BK, tf.int32), 1)
        before = (facts.bos_id, *facts.forced_ids)
        given_B = tf.fill([shape.rows], len(before)) if facts.has_source else count_B
        room_B = facts.most_positions - given_B + 1
        wanted_B = usual_tokens(count_B) if facts.has_source else room_B
        if options.most_tokens:
            wanted_B = tf.fill([shape.rows], options.most_tokens)
        values = {**options.row_values(), "limit_B": tf.minimum(wanted_B, room_B)}
        new = NestedMap(options=NestedMap())
        for name in OPTION_LEAVES:
            if name in state:
                value = tf.cast(values[name], state[name].dtype)
                new.options[name] = tf.broadcast_to(value, state[name].shape)
        if facts.has_source:
            new.source_aK = tf.where(is_token_BK, ids_BK, NO_TOKEN)
            new.last_a = tf.fill([shape.rows], before[-1])
            if len(before) > 1:
                new.given_ap = tf.tile(tf.constant([before[:-1]]), [shape.rows, 1])
        else:
            new.update(_given(ids_BK, count_B))
        return Admission(self.task, kind).run(weights, state, new, tf.range(shape.rows))


def check_options(options: DecodingOptions) -> None:
    """Raises ValueError if options ask for what an exported program does not do."""
    kind = options.kind
    supported = SearchKind(beam=kind.beam, covers=kind.covers)
    if kind != supported or options.stop or options.best > 1:
        raise UserError(
            "an exported program finds the best text by beam search or greedily: it draws no "
            "tokens, returns no several texts, and has neither stop nor sets of tokens"
        )


def decoding_weights(task: TokenTask, theta: NestedMap, precision: str = TRAINED) -> NestedMap:
    """Returns the weights that `DecodeFunction.run` takes, as NumPy arrays in a precision."""
    with tf.device("/device:CPU:0"):
        weights = stored_weights(task, theta.transform(tf.constant), precision)
    return weights.transform(lambda weight: weight.numpy())


def _given(ids_BK: tf.Tensor, count_B: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns `last_a`, the last id of each text, and `given_ap`, the right-aligned earlier ids."""
    length = known_sizes(ids_BK.shape)[1]
    last = tf.maximum(count_B - 1, 0)
    given = {"last_a": tf.gather(ids_BK, last, batch_dims=1)}
    if length > 1:
        index_Bp = tf.range(length - 1)[None, :] - (length - 1) + last[:, None]
        before_Bp = tf.gather(ids_BK, tf.maximum(index_Bp, 0), batch_dims=1)
        given["given_ap"] = tf.where(index_Bp >= 0, before_Bp, NO_TOKEN)
    return given


def _only_hypothesis(
    records: NestedMap, generated_B: tf.Tensor, facts: ModelFacts
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the ids that greedy decoding has chosen, and the sum of their log-probabilities."""
    token_BL = tf.transpose(records.token_BW[..., 0])
    gain_BL = tf.transpose(records.log_probability_BW[..., 0])
    is_generated_BL = tf.range(token_BL.shape[1]) < generated_B[:, None]
    is_end_BL = tf.reduce_any(tf.equal(tf.expand_dims(token_BL, -1), facts.end_ids), -1)
    is_kept_BL = is_generated_BL & tf.logical_not(is_end_BL)
    score_B = tf.reduce_sum(tf.where(is_generated_BL, gain_BL, 0.0), 1)
    return tf.where(is_kept_BL, token_BL, facts.pad_id), score_B


def _best_hypothesis(
    records: NestedMap, generated_B: tf.Tensor, pad_id: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the ids and the rank of the best hypothesis of each row, the first of equal ones."""
    most, rows, beam, ends = records.end_BWe.shape
    end_iBc = tf.reshape(records.end_BWe, [most, rows, beam * ends])
    rank_iBc = tf.concat([end_iBc, records.last_BW], -1)
    is_step_iB = tf.range(most)[:, None] < generated_B[None, :]
    rank_iBc = tf.where(is_step_iB[..., None], rank_iBc, IMPOSSIBLE)
    ways = (ends + 1) * beam
    rank_Bc = tf.reshape(tf.transpose(rank_iBc, [1, 0, 2]), [rows, most * ways])
    score_B, choice_B = (x_B1[:, 0] for x_B1 in top_few(rank_Bc, 1))
    # An ended hypothesis is one of the beam before the step, a cut one of the beam after it.
    way_B = choice_B % ways
    is_ended_B = way_B < beam * ends
    last_B = choice_B // ways - tf.cast(is_ended_B, tf.int32)
    last_place_B = tf.where(is_ended_B, way_B // ends, way_B - beam * ends)

    def is_running(step, *_):
        return step >= 0

    def run_one(step, place_B, token_iB):
        is_part_B = step <= last_B
        token_B = tf.gather(tf.gather(records.token_BW, step), place_B, batch_dims=1)
        parent_B = tf.gather(tf.gather(records.parent_BW, step), place_B, batch_dims=1)
        token_1B = tf.where(is_part_B, token_B, pad_id)[None]
        token_iB = shapes.write_slice(token_iB, token_1B, step)
        return step - 1, tf.where(is_part_B, parent_B, place_B), token_iB

    start = (tf.constant(most - 1), last_place_B, tf.fill([most, rows], pad_id))
    _, _, token_iB = tf.while_loop(is_running, run_one, start)
    return tf.transpose(token_iB), tf.where(generated_B > 0, score_B, 0.0)


TRANSLATION, LANGUAGE_MODEL = "translation", "language model"

# An export has a program for each of these batch sizes, unless the caller gives other sizes.
ROWS = (1, 8, 32)
LENGTHS = (32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class DecoderSettings:
    """Settings of decoding with an exported model.

        >>> greedy = gshard.DecodingOptions(beam_size=1)
        >>> gshard.DecoderSettings(greedy, rows=(1, 16), lengths=(64,)).rows
        (1, 16)

    Attributes:
      options: greedy decoding or beam search; None: a beam of 4 to translate, else greedily.
      rows: texts in a batch, ascending. A batch takes the next size, filled up with empty rows.
      lengths: ids of a text, ascending; longer texts are cut. Empty: up to what the model takes.
      precision: how weights are stored and multiplied; one of
        wings/inference/decoding/precision.py.
    """

    options: DecodingOptions | None = None
    rows: tuple[int, ...] = ROWS
    lengths: tuple[int, ...] = ()
    precision: str = TRAINED

    def __post_init__(self):
        check_precision(self.precision)
        if self.options:
            check_options(self.options)
        for flag, sizes in (("rows", self.rows), ("lengths", self.lengths)):
            is_ascending = all(a < b for a, b in itertools.pairwise(sizes))
            if not is_ascending or any(size < 1 for size in sizes):
                given = ",".join(map(str, sizes))
                raise UserError(
                    f"`{flag}={given}`: ascending sizes were expected, such as `{flag}=1,8,32`"
                )
        if not self.rows:
            raise UserError("`rows` is empty: sizes of a batch were expected, such as `rows=1,8`")

    @property
    def first_given(self) -> str:
        """The first option that differs from its default, for messages."""
        defaults = DecodingOptions()
        for field in dataclasses.fields(DecodingOptions) if self.options else ():
            if getattr(self.options, field.name) != getattr(defaults, field.name):
                return f"`{field.name}`"
        if self.options:
            return "`beam_size`"
        if self.precision != TRAINED:
            return "`precision`"
        return "`rows`" if self.rows != ROWS else "`lengths`"


@dataclasses.dataclass(frozen=True)
class PortableDecoder:
    """A model's decoder, ready to be written: programs for some numbers of rows and of ids.

    Attributes:
      weights: what `function` takes, as NumPy arrays.
      source: encodes texts; None for a model of ids.
      target: decodes answers; None for a model of ids.
    """

    model: TrainedModel
    function: DecodeFunction
    weights: NestedMap
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    source: Vocabulary | None
    target: Vocabulary | None
    precision: str = TRAINED

    @property
    def kind(self) -> str:
        """The kind of the model: TRANSLATION or LANGUAGE_MODEL."""
        return TRANSLATION if self.function.facts.has_source else LANGUAGE_MODEL

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """The sizes (rows, length) of all programs, ascending."""
        return list(itertools.product(self.rows, self.lengths))

    @property
    def nbytes(self) -> int:
        """The size of the weights in bytes."""
        return sum(weight.nbytes for weight in self.weights.flatten())


def check_task(params: Params) -> None:
    """Raises ValueError naming the task of an experiment if it decodes nothing."""
    task: type[Task] = params.task.cls
    if task.DECODING is None:
        raise UserError(
            f"{params.name} has the task {task.__name__}, which decodes nothing; "
            "`format=safetensors` writes its weights"
        )


def make_decoder(model: TrainedModel, settings: DecoderSettings) -> PortableDecoder:
    """Returns the decoder of a translation model or a language model.

    Raises:
      UserError: the model cannot search so, or takes no text as long as `settings.lengths`.
    """
    task, facts = model.task, facts_of(model.task, model.input.p, text_ids=model.input.text_ids)
    assert isinstance(task, TokenTask) and task.DECODING is not None
    options = settings.options or DecodingOptions(beam_size=task.DECODING.beam_size)
    most_beam = facts.vocabulary_size - len(facts.end_ids)
    if options.beam_size > most_beam:
        raise UserError(
            f"`beam_size={options.beam_size}`: 1 to {most_beam:,} was expected, no more than the "
            "vocabulary has tokens besides the end"
        )
    if options.most_tokens > facts.most_positions:
        raise UserError(
            f"`most_tokens={options.most_tokens}`: at most {facts.most_positions:,} was expected, "
            "the positions of the model"
        )
    function = DecodeFunction(task, facts, options)
    source, target = _vocabularies(model, facts.has_source)
    return PortableDecoder(
        model,
        function,
        decoding_weights(task, model.theta, settings.precision),
        settings.rows,
        _lengths(settings.lengths, function.longest),
        source,
        target,
        settings.precision,
    )


def _lengths(wanted: tuple[int, ...], longest: int) -> tuple[int, ...]:
    """Returns the lengths of the buckets; the default ends with the longest possible."""
    if not wanted:
        return (*(length for length in LENGTHS if length < longest), longest)
    if wanted[-1] > longest:
        raise UserError(
            f"`lengths={','.join(map(str, wanted))}`: the model takes texts of {longest:,} tokens "
            "at most"
        )
    return wanted


def _vocabularies(
    model: TrainedModel, has_source: bool
) -> tuple[Vocabulary | None, Vocabulary | None]:
    """Returns what encodes texts and what decodes answers; None for an input without them."""
    names = ("source_vocabulary", "target_vocabulary") if has_source else ("vocabulary",) * 2
    source, target = (getattr(model.input, name, None) for name in names)
    return source, target


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model on the host.

    Attributes:
      theta: the weights that evaluation uses, NumPy arrays in the dtypes of `specs`.
      averaged: whether these are averages over steps.
    """

    params: Params
    step: int
    task: Task
    specs: NestedMap
    theta: NestedMap
    averaged: bool
    input: Input

    def weights(self) -> list[tuple[VariableSpec, np.ndarray]]:
        """Returns the declaration and the value of each weight."""
        return list(zip(self.specs.flatten(), self.theta.flatten(), strict=True))

    @property
    def nbytes(self) -> int:
        """The size of all weights in bytes."""
        return sum(value.nbytes for _, value in self.weights())
