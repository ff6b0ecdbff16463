"""ConversationInput: packs conversations, and prompts with completions, for fine-tuning."""

from __future__ import annotations

import collections
import functools
import json
import os
import pathlib

import numpy as np

from lingvo_gshard.core import Params, UserError, tf
from lingvo_gshard.data import (
    CleaningReport,
    CorpusInput,
    Limit,
    MemoryTable,
    Row,
    TextIds,
    TextInput,
    TextSize,
    TokenizedRows,
    Vocabulary,
    load_vocabulary,
    mixture_plan,
    packing,
)
from lingvo_gshard.wings.fine_tuning.conversations import chat_template, encoding
from lingvo_gshard.wings.fine_tuning.conversations.encoding import Encoded, Encoder
from lingvo_gshard.wings.fine_tuning.conversations.examples import example_of
from lingvo_gshard.wings.fine_tuning.conversations.reader import ExampleCleaner, ExampleReader
from lingvo_gshard.wings.preparation.published_inputs import published_ids
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import PublishedVocabulary

TOO_MANY_TOKENS = "more tokens than a row has positions"
NOTHING_COUNTS = "no token counts in the loss"
NOT_WRITTEN = "the chat template refuses it"


class ConversationInput(TextInput, CorpusInput):
    """Reads conversations, writes them with the model's chat template, and packs them.

    The loss counts the tokens whose `target_marks` are 1. Each conversation is a segment: no token
    sees another conversation, and positions restart. The vocabulary and the template come from the
    checkpoint that a run starts with.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.set(corpus=ExampleReader.params(), cleaning=ExampleCleaner.params())
        p.define(
            "learn",
            encoding.ANSWERS,
            'What the loss counts of a conversation: "answers" of the assistant, only the "last" '
            'one, or "everything". Of a prompt with a completion, the completion counts.',
            choices=encoding.LEARNED,
        )
        p.define(
            "template",
            "",
            "File with a chat template in Jinja; empty: the template that the model was published "
            "with.",
        )
        p.define(
            "template_date",
            "2025-01-01",
            "The date that templates write into conversations. A fixed one makes runs repeatable.",
        )
        p.define("examples", (), "Messages that the page of gshard-serve offers to try.")
        p.define(
            "truncate", False, "Whether too long an example loses its end; False leaves it out."
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self._loaded: Vocabulary | None = None
        self._directory: pathlib.Path | None = None

    @classmethod
    def specs_of(cls, bucket: mixture_plan.Bucket) -> dict[str, tf.TensorSpec]:
        specs = super().specs_of(bucket)
        return specs | {"target_marks": specs["target_labels"]}

    @property
    def vocabulary(self) -> Vocabulary:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The vocabulary of the model; UserError if no checkpoint was loaded that has it."""
        if self._loaded is None:
            raise UserError(
                "conversations need the vocabulary of a trained model: start the run with "
                "`init_from`"
            )
        return self._loaded

    def load_vocabularies(self, directory: str | os.PathLike) -> None:
        """Replaces the vocabulary, and the chat template, by those that were saved."""
        self._directory = pathlib.Path(directory)
        if (self._directory / "config.json").is_file():
            self._loaded = PublishedVocabulary(self._directory)
        else:
            self._loaded = load_vocabulary(os.fspath(directory))
        vars(self).pop("template", None)
        self._forget_tokens()

    @property
    def text_ids(self) -> TextIds:
        return published_ids(self.vocabulary)

    @functools.cached_property
    def template(self) -> chat_template.ChatTemplate | None:
        """The chat template: a file of the Params, else the published one; None without any.

        Raises:
          UserError: the file is missing, or is no template.
        """
        vocabulary, path = self.vocabulary, pathlib.Path(self.p.template)
        saved = template_of(vocabulary, self._directory) if self._directory else None
        # The checkpoint of a run has the template: the file may be gone when the run is used.
        uses_file = bool(self.p.template) and (saved is None or path.expanduser().is_file())
        found = _template_in(path, vocabulary, self._directory) if uses_file else saved
        return found and found.at(self.p.template_date)

    def save_vocabularies(self, directory: str | os.PathLike) -> None:
        """Writes the vocabulary and the chat template into a directory, such as a checkpoint's."""
        super().save_vocabularies(directory)
        if self.template:
            path = pathlib.Path(directory) / chat_template.TEMPLATE_FILE
            path.write_text(self.template.source, encoding="utf-8")

    def cut(self, rows: np.ndarray, lengths: np.ndarray) -> mixture_plan.Pieces:
        """Returns each example as one piece. Its first token is given and not predicted."""
        predicted = lengths[:, 1] - 1
        sizes = np.minimum(predicted, self.p.length) if self.p.truncate else predicted
        return mixture_plan.Pieces(
            rows, np.ones(len(rows), np.int64), np.stack([sizes, sizes], axis=1)
        )

    def text_size(self, split: str) -> TextSize:
        """Returns the amount of text in a split that counts in the loss."""
        table = self.table(split)
        assert table.marks is not None
        texts = []
        for begin, end in zip(table.targets.offsets, table.targets.offsets[1:], strict=False):
            counted = table.marks.ids[begin:end] == 1
            texts.append(self.vocabulary.text_of(table.targets.ids[begin:end][counted].tolist()))
        return TextSize(
            documents=len(texts),
            bytes=sum(len(text.encode("utf-8")) for text in texts),
            words=sum(len(text.split()) for text in texts),
        )

    def _encode(self, encoder: Encoder, row: Row) -> Encoded:
        """Returns the ids of an example and their marks. Raises ValueError if it has none."""
        return encoder.encode(example_of(json.loads(row.target)))

    def _tokenize(self, split: str, rows: list[Row], report: CleaningReport) -> TokenizedRows:
        self.progress.begin("Tokenizing", "examples")
        encoder = Encoder(self.vocabulary, self.template, self.p.learn)
        kept: list[Encoded] = []
        dropped: dict[str, list[Row]] = collections.defaultdict(list)
        lengths = collections.Counter[int]()
        for number, row in enumerate(rows):
            if number % 1024 == 0:
                self.progress.update(number, number / len(rows))
            try:
                encoded = self._encode(encoder, row)
            except UserError as error:
                if self.p.corpus.on_bad_row == "refuse":
                    raise UserError(f"{row.file}:{row.line}: {error}") from None
                dropped[NOT_WRITTEN].append(row)
                continue
            lengths[len(encoded.ids) - 1] += 1
            reason = self._reason_against(encoded)
            if reason:
                dropped[reason].append(row)
            else:
                kept.append(encoded)
        limit = Limit("input.length", "tokens", self.p.length, lengths)
        for reason, left in dropped.items():
            report = report.without(left, reason, ())
        report = report.without((), "", () if self.p.truncate else (limit,))
        return TokenizedRows(self._table_of(kept), report)

    def _reason_against(self, encoded: Encoded) -> str:
        """Returns why an example is left out; "" if it is not."""
        if len(encoded.ids) - 1 > self.p.length and not self.p.truncate:
            return TOO_MANY_TOKENS
        seen = encoded.counts[: self.p.length + 1] if self.p.truncate else encoded.counts
        return "" if (seen & 1).any() else NOTHING_COUNTS

    def _table_of(self, kept: list[Encoded]) -> MemoryTable:
        lengths = np.array([len(encoded.ids) for encoded in kept], np.int64)
        empty = np.zeros(0, np.int32)
        targets = packing.Tokens.of(np.concatenate([empty, *(each.ids for each in kept)]), lengths)
        marks = packing.Tokens.of(np.concatenate([empty, *(each.counts for each in kept)]), lengths)
        no_sources = packing.Tokens.of(empty, np.zeros(len(kept), np.int64))
        return MemoryTable(no_sources, targets, [""] * len(kept), marks)


def chat_template_of(input_: TextInput) -> chat_template.ChatTemplate | None:
    """Returns the chat template of an input whose vocabulary is loaded; None without any."""
    if isinstance(input_, ConversationInput):
        return input_.template
    vocabulary = input_.vocabulary
    is_published = isinstance(vocabulary, PublishedVocabulary)
    return chat_template.ChatTemplate.of_model(vocabulary.directory) if is_published else None


def template_of(
    vocabulary: Vocabulary, directory: pathlib.Path
) -> chat_template.ChatTemplate | None:
    """Returns the chat template in the directory of a published model or of a run; None without.

    Raises:
      UserError: a file is damaged.
    """
    if isinstance(vocabulary, PublishedVocabulary):
        return chat_template.ChatTemplate.of_model(directory)
    path = directory / chat_template.TEMPLATE_FILE
    return _template_in(path, vocabulary, directory) if path.is_file() else None


def _template_in(
    path: pathlib.Path, vocabulary: Vocabulary, directory: pathlib.Path | None
) -> chat_template.ChatTemplate:
    """Returns the chat template in a file, with the special tokens of a vocabulary."""
    source = chat_template.read_template(path.expanduser(), f"input.template: {path}")
    if isinstance(vocabulary, PublishedVocabulary) and directory:
        return chat_template.ChatTemplate(source, chat_template.tokens_of(directory), str(path))
    ids = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    tokens = {name: vocabulary.piece(index) for name, index in ids.items()}
    return chat_template.ChatTemplate(source, tokens, str(path))
