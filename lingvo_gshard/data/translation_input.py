"""TranslationInput: turns sentence pairs into packed batches."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core import Params, UserError, listed, names
from lingvo_gshard.data import stages
from lingvo_gshard.data.batching.packing import Tokens
from lingvo_gshard.data.batching.table import MemoryTable
from lingvo_gshard.data.corpus_input import CorpusInput, TokenizedRows
from lingvo_gshard.data.input import TextIds
from lingvo_gshard.data.packed_input import EncodeBatch, PairInput, encode
from lingvo_gshard.data.sources import tsv
from lingvo_gshard.data.sources.report import CleaningReport, Limit
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

TOO_MANY_TOKENS = "more tokens than a batch's row"


class TranslationInput(PairInput, CorpusInput):
    """Reads, cleans, tokenizes, mixes and packs sentence pairs. Each stage runs on first use."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        cleaner = stages.INPUT_STAGES[stages.PAIRS]
        p.set(corpus=tsv.EmbeddedCorpus.params(), cleaning=cleaner.params())
        p.define("languages", (), "Source languages to use; empty: all.")
        p.define("temperature", 1.0, "Samples languages as n_l ** (1 / temperature).", minimum=1)
        p.define(
            "segmentations",
            1,
            "Number of segmentations into pieces of each training row: the likeliest, and others "
            "at random (subword regularization, arXiv 1804.10959).",
            minimum=1,
        )
        p.define(
            "segmentation_alpha",
            0.2,
            "How much random segmentations prefer likely pieces; 0: not at all. Of a vocabulary of "
            "type bpe: the share of merges left out.",
            minimum=0,
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self._languages = listed(self.p.languages)

    @property
    def temperature(self) -> float:
        """Temperature of the sampling of languages."""
        return self.p.temperature

    @property
    def languages(self) -> tuple[str, ...]:
        """The source languages in use: as given, else all, sorted."""
        return self._languages or tuple(sorted({row.language for row in self.rows("train")}))

    @property
    def notes(self) -> list[str]:
        covered = self._trainer.coverage_notes(self.rows("train"), *self._vocabularies)
        return [*super().notes, *covered]

    @property
    def text_ids(self) -> TextIds:
        return super().text_ids if self.p.vocabulary.files else TextIds()

    @functools.cached_property
    def _vocabularies(self) -> tuple[Vocabulary, Vocabulary]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._trainer.train(self.rows("train"), self.p.temperature)

    def _encode(self, rows: Sequence[Row], segmentation: int) -> tuple[Tokens, Tokens]:
        """Returns the tokens of all sources and of all targets, with the ids around each text.

        Args:
          segmentation: its number. 0 is the likeliest one; every other number is the seed of a
            random one.
        """
        (source, target), progress = self._vocabularies, self.progress
        number = (
            f", segmentation {segmentation + 1} of {self.p.segmentations}" if segmentation else ""
        )
        progress.begin(f"Tokenizing sources{number}", "sentences")
        texts, first = [row.source for row in rows], source.source_start
        sources = encode(texts, source, progress, first, self._encoder(source, segmentation))
        progress.begin(f"Tokenizing targets{number}", "sentences")
        texts, first = [row.target for row in rows], target.target_start[1:]
        return sources, encode(texts, target, progress, first, self._encoder(target, segmentation))

    def _encoder(self, vocabulary: Vocabulary, segmentation: int) -> EncodeBatch:
        """Returns the function that encodes texts with a segmentation; see `_encode`."""
        if not segmentation:
            return vocabulary.encode_batch
        if not vocabulary.can_sample:
            raise UserError(
                f"input.segmentations = {self.p.segmentations}: a vocabulary of SentencePiece "
                f"was expected, but this one, {type(vocabulary).__name__}, has one segmentation"
            )
        alpha = self.p.segmentation_alpha
        return functools.partial(vocabulary.sample_batch, alpha=alpha, seed=segmentation)

    def _fits(self, sources: Tokens, targets: Tokens) -> np.ndarray:
        """Returns, for each sentence pair, whether both sides fit into a batch's row, as bool."""
        fits = sources.lengths <= self.p.source_length
        return fits & (targets.lengths <= self.p.target_length)

    def _choose(self, rows: list[Row], split: str) -> list[Row]:
        if not self._languages:
            return rows
        there = {row.language for row in rows}
        for language in self._languages:
            if language in there:
                continue
            # A small language may lack held-out rows, but every language has training rows.
            valid = there if split == "train" else {row.language for row in self.rows("train")}
            names.check(language, valid, f"input.languages: the corpus has no {language!r}")
        return [row for row in rows if row.language in self._languages]

    def _tokenize(self, split: str, rows: list[Row], report: CleaningReport) -> TokenizedRows:
        # Example i is row i % len(rows) in segmentation i // len(rows).
        count = self.p.segmentations if split == "train" else 1
        encoded = [self._encode(rows, number) for number in range(count)]
        sources, targets = map(Tokens.join, zip(*encoded, strict=True))
        fits = self._fits(sources, targets)
        kept = np.flatnonzero(fits)
        dropped = np.flatnonzero(~fits[: len(rows)])
        if split != "train" and len(dropped):
            _log.warning("%d rows of %s are left out: %s", len(dropped), split, TOO_MANY_TOKENS)
        languages = [rows[index % len(rows)].language for index in kept]
        table = MemoryTable(sources.take(kept), targets.take(kept), languages)
        limits = self._limits(*encoded[0])
        without = report.without([rows[index] for index in dropped], TOO_MANY_TOKENS, limits)
        return TokenizedRows(table, without)

    def _limits(self, sources: Tokens, targets: Tokens) -> list[Limit]:
        sides = (
            ("source", sources, self.p.source_length),
            ("target", targets, self.p.target_length),
        )
        return [
            Limit(
                f"input.{side}_length",
                f"{side} tokens",
                length,
                collections.Counter(tokens.lengths.tolist()),
            )
            for side, tokens, length in sides
        ]
