"""PreparedInput: the base class of inputs that read what gshard-prepare has written."""

from __future__ import annotations

import collections
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_gshard.core import Params, UserError, listed
from lingvo_gshard.data import (
    CleaningReport,
    Group,
    Limit,
    PackedInput,
    Row,
    TrainBatches,
    Vocabulary,
    mixture_plan,
    packing,
)
from lingvo_gshard.wings.preparation.cleaning.report_notes import advice_of
from lingvo_gshard.wings.preparation.mixing import Shares, Use, uses
from lingvo_gshard.wings.preparation.prepared import manifest as manifests
from lingvo_gshard.wings.preparation.prepared.table import ERROR, SKIP, PreparedTable

_ROWS_AT_A_TIME = 8192
# The share of a batch's positions that hold tokens, to estimate steps from tokens.
_USUAL_FILL = 0.98


class PreparedInput(PackedInput):
    """Mixes and packs the rows of a directory of prepared data, and holds no text in memory."""

    # The content that a manifest must have. Batches have a source if it is pairs.
    content = manifests.PAIRS
    unknown_language = manifests.NO_LANGUAGE

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("directory", "", "Directory that gshard-prepare has written.")
        p.define("languages", (), "Source languages to use; empty: all.")
        p.define("mixing", Shares.params(), "Params of the shares of languages and sources.")
        p.define(
            "on_damage",
            ERROR,
            '"error" to stop at a shard that cannot be read, "skip" to leave out its rows.',
            choices=(ERROR, SKIP),
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self._shares: Shares = self.p.mixing.instantiate()

    @functools.cached_property
    def manifest(self) -> manifests.Manifest:
        """The manifest of the directory. UserError if missing, unreadable, or for other inputs."""
        if not self.p.directory:
            raise UserError(
                "input.directory is empty; a directory that gshard-prepare has written was expected"
            )
        found = manifests.read(self.p.directory)
        if found.content != self.content:
            raise UserError(
                f"{self.p.directory}: the prepared data is of the kind {found.content!r}; "
                f"{type(self).__name__} reads {self.content!r}"
            )
        return found

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that have rows."""
        return tuple(split for split in self.manifest.splits if self.manifest.rows(split))

    @functools.cached_property
    def report(self) -> CleaningReport:
        """Counts of the rows that were prepared, by their fate."""
        return cleaning_report(self.manifest, self.p.directory)

    @functools.cached_property
    def notes(self) -> list[str]:
        """Lines about the training rows that a user should know."""
        counts = [collections.Counter[int]() for _ in range(2)]
        for lengths in self.table("train").lengths.shards():
            for side, counter in enumerate(counts):
                found = np.unique(lengths[:, side], return_counts=True)
                counter.update(dict(zip(*map(np.ndarray.tolist, found), strict=True)))
        limits = [
            Limit(f"input.{side}_length", f"{side} tokens", self.buckets[-1][1 + column], count)
            for column, (side, count) in enumerate(zip(self._limited_sides, counts, strict=False))
        ]
        return [advice_of(limit) for limit in limits if limit.exceeded]

    # Sides whose longer rows are left out.
    _limited_sides: tuple[str, ...] = ()

    def usage(self) -> list[Use]:
        """Returns how often the rows of each language were read; none before training."""
        if self._planner is None or self._batches is None:
            return []
        position = self._batches.get_state()
        return uses(self._planner, position["block"], position["batch"])

    def usage_notes(self) -> list[str]:
        """Returns lines about epochs and repeats of languages, for the end of training."""
        return usage_notes(self.usage())

    def table(self, split: str) -> PreparedTable:
        """Returns the rows of a split; UserError if there is none, or a file is damaged."""
        if split not in self._tables:
            self._tables[split] = PreparedTable(
                self.p.directory, self.manifest, split, self.p.on_damage, listed(self.p.languages)
            )
        return self._tables[split]

    @functools.cached_property
    def _tables(self) -> dict[str, PreparedTable]:
        return {}

    def check_split(self, split: str) -> None:
        """Raises UserError if a file of a split is missing or changed, or no row fits a batch."""
        table, begin = self.table(split), 0
        for lengths in table.lengths.shards():
            rows = np.arange(begin, begin + len(lengths))
            pieces = self.cut(rows, lengths.astype(np.int64))
            if (mixture_plan.bucket_of(pieces.lengths, self.buckets) >= 0).any():
                return
            begin += len(lengths)
        raise UserError(
            f"{self.p.directory}: none of the {begin:,} rows of {split!r} fits a batch's row of "
            f"{self.buckets[-1][1]} source and {self.buckets[-1][2]} target tokens"
        )

    def rows(self, split: str) -> list[Row]:
        """Returns the rows of a split as text, decoded from their tokens."""
        table, found = self.table(split), []
        for group in table.groups:
            for begin in range(group.begin, group.begin + group.rows, _ROWS_AT_A_TIME):
                end = min(begin + _ROWS_AT_A_TIME, group.begin + group.rows)
                texts = self._texts(table, np.arange(begin, end))
                place = f"{split}/{group.language}/{group.source}"
                language = "" if group.language == manifests.NO_LANGUAGE else group.language
                found += [
                    Row(language, source, target, place, begin + number - group.begin)
                    for number, (source, target) in enumerate(texts, start=1)
                ]
        return found

    def _texts(self, table: PreparedTable, rows: np.ndarray) -> Iterator[tuple[str, str]]:
        """Yields the source and the target of rows; "" for a side that batches do not have."""
        sides = []
        records = table.read(rows)
        for name, tokens in (("source", records.sources), ("target", records.targets)):
            if name in self.sides:
                vocabulary = self.sides[name][1]
                parts = np.split(tokens.ids, tokens.offsets[1:-1])
                sides.append([vocabulary.decode(part.tolist()) for part in parts])
            else:
                sides.append([""] * len(rows))
        return zip(*sides, strict=True)

    def train_batches(self, seed: int) -> TrainBatches:
        self._check_vocabularies()
        return super().train_batches(seed)

    def evaluation_batches(self, split: str) -> Iterator[packing.Batch]:
        self._check_vocabularies()
        return super().evaluation_batches(split)

    def _plan(self, seed: int) -> mixture_plan.Planner:
        table = self.table("train")
        groups = self._shares.used(table.groups)
        shares = self._shares.by_block(groups, lambda shares: self._steps_of(groups, shares))
        mixture = mixture_plan.Mixture(groups, shares, self.p.packing_window, seed)
        return mixture_plan.Planner(
            mixture,
            lambda rows: self.cut(rows, table.lengths_of(rows)),
            self.buckets,
            seed,
            *self.packing,
        )

    @functools.cached_property
    def _prepared_vocabularies(self) -> dict[str, Vocabulary]:
        """Side -> the vocabulary that the data was prepared with."""
        return manifests.read_vocabularies(self.p.directory, self.manifest)

    def _check_vocabularies(self) -> None:
        """Raises UserError if a checkpoint has brought other vocabularies than the data's."""
        for side, (_, vocabulary) in self.sides.items():
            if vocabulary != self._prepared_vocabularies[side]:
                raise UserError(
                    f"{self.p.directory}: the data was prepared with another {side} vocabulary "
                    "than that of the checkpoint. Prepare it with the checkpoint's vocabulary"
                )

    def _steps_of(self, groups: Sequence[Group], shares: np.ndarray) -> float:
        """Estimates the steps that train on a block, from the mean lengths of rows."""
        tokens = sum(
            share * sum(group.tokens) / group.rows
            for share, group in zip(shares.tolist(), groups, strict=True)
        )
        positions = np.mean([rows * self._positions(bucket) for rows, *bucket in self.buckets])
        return self.p.packing_window * tokens / (_USUAL_FILL * positions)

    def _positions(self, lengths: Sequence[int]) -> int:
        """Returns the positions of a row, both sides counted."""
        return sum(lengths) if self.content == manifests.PAIRS else lengths[-1]

    def _identity(self, seed: int) -> str:
        shards = [
            (s.language, s.source, s.file, s.sha256, s.lengths_sha256)
            for s in self.table("train").shards
        ]
        settings = self.p.mixing.to_text(), self.buckets, *self.packing, self.before
        content = repr((sorted(shards), *settings, seed))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


# Languages that are named one by one.
_MOST_NAMED = 8


def cleaning_report(manifest: manifests.Manifest, directory: str | os.PathLike) -> CleaningReport:
    """Returns how many rows preparation kept, dropped and rewrote, over all splits."""
    counts = manifest.languages
    report = CleaningReport(
        split=os.fspath(directory),
        read=sum(language.read for language in counts.values()),
        kept=sum(sum(language.kept.values()) for language in counts.values()),
        dropped=collections.Counter({r.reason: r.rows for r in manifest.rejections}),
        rewritten=collections.Counter(manifest.rewritten),
        examples={r.reason: r.examples[0] for r in manifest.rejections if r.examples},
    )
    for name, language in counts.items():
        code = "" if name == manifests.NO_LANGUAGE else name
        report.kept_by_language[code] = sum(language.kept.values())
        for reason, rows in language.rejected.items():
            report.dropped_by_language[code, reason] = rows
    return report


def usage_notes(found: Sequence[Use]) -> list[str]:
    """Returns lines about how often each language was read."""
    if not found:
        return []
    read, rows = sum(use.read for use in found), sum(use.rows for use in found)
    lines = [f"rows read: {read:,} of {rows:,}, {read / rows:.2f} epochs"]
    by_epochs = sorted(found, key=lambda use: -use.epochs)
    if len(found) > 1:
        lines.append("epochs by language: " + _named(by_epochs))
    if repeated := [use for use in found if use.read > use.rows]:
        repeats = sum(use.read - use.rows for use in repeated)
        lines.append(f"repeated: {repeats:,} rows; languages: {len(repeated)}")
    return lines


def _named(uses: list[Use]) -> str:
    """Returns the epochs of the most and of the least repeated languages."""
    half = _MOST_NAMED // 2
    names = [f"{use.language} {use.epochs:.2f}" for use in uses]
    if len(names) > _MOST_NAMED:
        names = [*names[:half], "...", *names[-half:]]
    return ", ".join(names)
