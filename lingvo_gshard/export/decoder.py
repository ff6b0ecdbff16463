"""PortableDecoder: what the formats that decode have in common."""

from __future__ import annotations

import dataclasses
import itertools

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.vocabulary import Vocabulary
from lingvo_gshard.decoding.precision import TRAINED, check_precision
from lingvo_gshard.export.decode_function import DecodeFunction, check_options, decoding_weights
from lingvo_gshard.export.trained_model import TrainedModel
from lingvo_gshard.inference.loading import facts_of
from lingvo_gshard.inference.options import DecodingOptions
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.tasks.token_task import TokenTask

TRANSLATION, LANGUAGE_MODEL = "translation", "language model"

# Sizes of batches for which a program is made, unless others are asked for.
ROWS = (1, 8, 32)
LENGTHS = (32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class DecoderSettings:
    """Settings of decoding with an exported model.

    Attributes:
      options: greedy decoding or beam search; None: a beam of 4 to translate, else greedily.
      rows: texts in a batch, ascending. A batch takes the next size, filled up with empty rows.
      lengths: ids of a text, ascending; longer texts are cut. Empty: up to what the model takes.
      precision: how weights are stored and multiplied; one of decoding/precision.py.
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
    """A model's decoder, ready to be written.

    Attributes:
      model: the model.
      function: decodes a batch.
      weights: what `function` takes, as NumPy arrays.
      rows: sizes of batches, ascending.
      lengths: ids of a text, ascending.
      source: encodes texts; None for a model of ids.
      target: decodes answers; None for a model of ids.
      precision: how the weights are stored and multiplied.
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
