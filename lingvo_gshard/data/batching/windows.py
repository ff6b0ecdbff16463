"""Windows: documents cut to the length of a batch's rows and packed side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.data.batching import packing
from lingvo_gshard.data.batching.packing import BOS_ID, Batch, Tokens


@dataclasses.dataclass(frozen=True)
class Windows:
    """Consecutive parts of documents, for batches of `shape` (B, L).

    labels: the tokens of each window. before: the token that stands before each in its document,
    BOS before the first of one. documents: the document of each.
    """

    labels: Tokens
    before: np.ndarray
    documents: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def cut(cls, documents: Tokens, shape: tuple[int, int]) -> Windows:
        """Returns the windows of documents, each of L tokens but the last of a document.

        So every token is predicted once, from at most the L - 1 tokens before it and the one that
        the window before ended with.
        """
        length = shape[1]
        counts = -(-documents.lengths // length)
        of_window = np.repeat(np.arange(len(documents)), counts)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = documents.offsets[of_window] + number * length
        before = np.where(number > 0, documents.ids[begins - 1], BOS_ID)
        offsets = np.append(begins, documents.offsets[-1])
        return cls(Tokens(documents.ids, offsets), before, of_window, shape)

    @property
    def batch_rows(self) -> int:
        """Rows of a batch."""
        return self.shape[0]

    def first_fit(self, windows: np.ndarray) -> np.ndarray:
        """Returns the row of each, rows numbered in the order they were opened."""
        lengths = self.labels.lengths[windows]
        return packing.first_fit(lengths, lengths, self.shape[1], self.shape[1])

    def pack(self, rows: np.ndarray, windows: np.ndarray) -> Batch:
        """Lays windows into one batch: target_{inputs,labels,segments,positions}, int32 [B, L].

        As the target side of `packing.pack`: segments count from 1 in each row, positions restart
        in each segment, 0 is padding, inputs are the labels shifted right behind `before`.
        """
        order = np.argsort(rows, kind="stable")
        rows, windows = rows[order], windows[order]
        lengths, labels = self.labels.lengths[windows], self.labels.gather(windows)
        return packing.packed_targets(rows, lengths, labels, self.before[windows], *self.shape)

    def tables(self) -> Iterator[np.ndarray]:
        """Yields the arrays that say what the windows are."""
        yield from (self.labels.ids, self.labels.offsets, self.before)
