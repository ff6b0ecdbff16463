"""TranslationInput: from a corpus of sentence pairs to packed batches."""

import collections
import functools
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from absl import logging

from lingvo_gshard.core import names
from lingvo_gshard.core.params import Configurable, Params
from lingvo_gshard.data import (
    batches,
    cleaning,
    mixing,
    packing,
    prefetch,
    tsv,
    vocabulary,
    vocabulary_trainer,
)
from lingvo_gshard.data.packing import Batch, Tokens
from lingvo_gshard.data.row import Row
from lingvo_gshard.data.vocabulary import Vocabulary

TOO_MANY_TOKENS = "more tokens than a batch's row"
_ENCODED_AT_A_TIME = 50_000


class TranslationInput(Configurable):
    """Reads, cleans, tokenises, mixes and packs a parallel corpus; each on first use.

    Batches are dicts of int32 arrays as `packing.pack` says.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("corpus", tsv.EmbeddedCorpus.params(), "The reader of the corpus.")
        p.define("languages", (), "Source languages to use; empty: all there are.")
        p.define("cleaning", cleaning.Cleaner.params(), "What is rewritten and dropped.")
        p.define("vocabulary", vocabulary_trainer.VocabularyTrainer.params(), "The vocabularies.")
        p.define("temperature", 1.0, "Languages are drawn as n_l ** (1 / temperature).")
        p.define("batch_rows", 16, "B: rows of a batch.")
        p.define("source_length", 256, "L: source positions of a row.")
        p.define(
            "target_length",
            256,
            "K: target positions of a row. Rows fill best when K / L is the ratio of the corpus's "
            "target and source tokens.",
        )
        p.define("packing_window", 8192, "Sentences drawn and packed at a time.")
        p.define("prefetch_batches", 4, "Batches made ahead by a background thread.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        p = self.p
        for name in ("batch_rows", "source_length", "target_length", "packing_window"):
            if getattr(p, name) < 1:
                raise ValueError(f"input.{name} must be at least 1, not {getattr(p, name)}")
        if not p.temperature >= 1:
            raise ValueError(f"input.temperature must be at least 1, not {p.temperature}")
        self._reader = p.corpus.instantiate()
        self._cleaner = p.cleaning.instantiate()
        self._trainer = p.vocabulary.instantiate()
        self._held_out: dict[str, _Examples] = {}
        self._cleaned: dict[str, tuple[list[Row], cleaning.CleaningReport]] = {}
        self._languages = (p.languages,) if isinstance(p.languages, str) else tuple(p.languages)

    @property
    def languages(self) -> tuple[str, ...]:
        """The source languages in use, as given or else sorted."""
        return self._languages or tuple(sorted({row.language for row in self.rows("train")}))

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that the corpus has."""
        return self._reader.splits

    def rows(self, split: str) -> list[Row]:
        """Returns the cleaned rows of "train", "dev" or "test" in the corpus's order.

        Raises ValueError for a split or a language that the corpus lacks, and what the reader
        raises for rows that cannot be read.
        """
        return self._load(split)[0]

    @property
    def report(self) -> cleaning.CleaningReport:
        """What became of the training rows, the over-long ones included."""
        return self._examples.report

    def held_out_report(self, split: str) -> cleaning.CleaningReport:
        """What became of the rows of "dev" or "test"."""
        return self._load(split)[1]

    @property
    def source_vocabulary(self) -> Vocabulary:
        """The sources' vocabulary; the same object as the targets' when joint."""
        return self._vocabularies[0]

    @property
    def target_vocabulary(self) -> Vocabulary:
        """The targets' vocabulary."""
        return self._vocabularies[1]

    def save_vocabularies(self, directory: str) -> None:
        """Writes the vocabularies into a directory, such as a checkpoint's."""
        vocabulary.save_pair(directory, *self._vocabularies)

    def load_vocabularies(self, directory: str) -> None:
        """Uses saved vocabularies from now on in place of trained ones."""
        self._vocabularies = vocabulary.load_pair(directory)
        self.__dict__.pop("_examples", None)
        self._held_out.clear()

    @staticmethod
    def batch_spec(params: Params) -> dict[str, tuple[tuple[int, int], str]]:
        """Returns {name: (shape, dtype)} of a batch, for which no corpus is needed."""
        wide = (params.batch_rows, params.source_length)
        narrow = (params.batch_rows, params.target_length)
        shapes = {f"source_{part}": wide for part in ("ids", "segments", "positions")}
        target_parts = ("inputs", "labels", "segments", "positions")
        shapes |= {f"target_{part}": narrow for part in target_parts}
        return {name: (shape, "int32") for name, shape in shapes.items()}

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """Returns the endless iterator of training batches for a seed.

        It has get_state() -> JSON-able dict, the position after the last batch handed out, and
        set_state(state), after which the same batches follow as did then. close() ends its thread.
        """
        p, examples = self.p, self._examples
        mixture = mixing.Mixture(examples.members, p.temperature, p.packing_window, seed)
        stream = batches.PackedBatches(
            examples.sources,
            examples.targets,
            mixture,
            self._shape,
            identity=self._identity(seed),
        )
        return prefetch.Prefetcher(stream, p.prefetch_batches)

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        """Yields every row of a split once, packed as in training; the last batch is padded."""
        examples = self._held_out_examples(split)
        yield from packing.batches_in_order(
            examples.sources, examples.targets, examples.kept, self._shape
        )

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.p.batch_rows, self.p.source_length, self.p.target_length

    @functools.cached_property
    def _vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        return self._trainer.train(self.rows("train"), self.p.temperature)

    def _load(self, split):
        if split not in self._cleaned:
            rows = self._of_languages(self._reader.rows(split), split)
            kept, report = self._cleaner.clean(rows, split)
            report.examples = list(self._reader.examples)
            for reason, count in self._reader.left_out.items():
                report.read += count
                report.dropped[reason] += count
            self._cleaned[split] = kept, report
        return self._cleaned[split]

    def _of_languages(self, rows: list[Row], split: str) -> list[Row]:
        if not self._languages:
            return rows
        there = {row.language for row in rows}
        for language in self._languages:
            if language in there:
                continue
            # A small language may well have no held-out row, but none lacks training rows.
            valid = there if split == "train" else {row.language for row in self.rows("train")}
            if language not in valid:
                raise ValueError(
                    f"input.languages: the corpus has no {language!r}. "
                    f"{names.nearest(language, valid)}"
                )
        return [row for row in rows if row.language in self._languages]

    @functools.cached_property
    def _examples(self) -> "_Examples":
        examples = self._tokenise(*self._load("train"))
        if not examples.members:
            raise ValueError(f"No training row is left: {examples.report.to_table()}")
        return examples

    def _held_out_examples(self, split: str) -> "_Examples":
        if split not in self._held_out:
            examples = self._tokenise(*self._load(split))
            dropped = len(self.rows(split)) - len(examples.kept)
            if dropped:
                logging.warning("%d rows of %s are left out: %s", dropped, split, TOO_MANY_TOKENS)
            self._held_out[split] = examples
        return self._held_out[split]

    def _tokenise(self, rows, report) -> "_Examples":
        source_ids = encode([row.source for row in rows], self.source_vocabulary)
        target_ids = encode([row.target for row in rows], self.target_vocabulary)
        fits = source_ids.lengths <= self.p.source_length
        fits &= target_ids.lengths <= self.p.target_length
        return _Examples(rows, report, source_ids, target_ids, np.flatnonzero(fits))

    def _identity(self, seed: int) -> str:
        digest = hashlib.sha256()
        for tokens in (self._examples.sources, self._examples.targets):
            digest.update(tokens.ids.tobytes() + tokens.offsets.tobytes())
        for language, members in sorted(self._examples.members.items()):
            digest.update(language.encode() + members.tobytes())
        settings = (self._shape, float(self.p.temperature), self.p.packing_window, seed)
        digest.update(repr(settings).encode())
        return digest.hexdigest()[:16]


class _Examples:
    """The tokenised sentences of a split that fit a batch's row, by language."""

    def __init__(self, rows, report, sources: Tokens, targets: Tokens, kept: np.ndarray):
        self.sources, self.targets, self.kept = sources, targets, kept
        members = collections.defaultdict(list)
        for index in kept:
            members[rows[index].language].append(index)
        self.members = {language: np.asarray(m) for language, m in members.items()}
        too_long = len(rows) - len(kept)
        self.report = cleaning.with_dropped(report, TOO_MANY_TOKENS, too_long)


def encode(texts: Sequence[str], vocabulary: Vocabulary) -> Tokens:
    """Returns the ids of many lines, each with EOS behind it; repeated lines are encoded once."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    unique = list(numbers)
    ids, lengths = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    # By parts: as lists of Python integers, millions of lines would take gigabytes.
    for begin in range(0, len(unique), _ENCODED_AT_A_TIME):
        encoded = vocabulary.encode_batch(unique[begin : begin + _ENCODED_AT_A_TIME])
        part = Tokens.concatenate([line + [vocabulary.eos_id] for line in encoded])
        ids.append(part.ids)
        lengths.append(part.lengths)
    table = Tokens.of(np.concatenate(ids), np.concatenate(lengths))
    chosen = np.fromiter((numbers[text] for text in texts), np.int64, len(texts))
    return Tokens.of(table.gather(chosen), table.lengths[chosen])
