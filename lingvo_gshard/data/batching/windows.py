"""Windows: documents cut to the length of a batch's rows, and packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.data.batching import packing
from lingvo_gshard.data.batching.packing import Batch, Tokens


@dataclasses.dataclass(frozen=True)
class Windows:
    """Consecutive parts of documents.

    Attributes:
      labels: tokens of each window.
      before: the token before each window in its document; BOS before the first.
      documents: number of each window's document.
      shape: rows B and length L of a batch.
    """

    labels: Tokens
    before: np.ndarray
    documents: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def cut(cls, documents: Tokens, shape: tuple[int, int], bos_id: int) -> Windows:
        """Cuts documents into windows of L tokens; the last of a document may be shorter.

        Every token is thus predicted once, from at most the L tokens before it.

        Args:
          documents: tokens of each document.
          shape: rows B and length L of a batch.
          bos_id: id before the first token of a document.
        """
        length = shape[1]
        counts = -(-documents.lengths // length)
        of_window = np.repeat(np.arange(len(documents)), counts)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = documents.offsets[of_window] + number * length
        before = np.where(number > 0, documents.ids[begins - 1], bos_id)
        offsets = np.append(begins, documents.offsets[-1])
        return cls(Tokens(documents.ids, offsets), before, of_window, shape)

    @property
    def batch_rows(self) -> int:
        """Rows of a batch."""
        return self.shape[0]

    def first_fit(self, windows: np.ndarray) -> np.ndarray:
        """Returns the row of each window; rows are numbered in the order they were opened."""
        lengths = self.labels.lengths[windows]
        return packing.first_fit(lengths, lengths, self.shape[1], self.shape[1])

    def pack(self, rows: np.ndarray, windows: np.ndarray) -> Batch:
        """Returns one batch of windows: target_{inputs,labels,segments,positions}, int32 [B,L].

        Segments count from 1 in each row, padding has 0. Positions restart in each segment. The
        inputs of a segment are the token before it, and its labels without the last one.

        Args:
          rows: the row of each window, 0 to B - 1.
          windows: the number of each window.
        """
        order = np.argsort(rows, kind="stable")
        rows, windows = rows[order], windows[order]
        lengths, labels = self.labels.lengths[windows], self.labels.gather(windows)
        return packing.packed_targets(rows, lengths, labels, self.before[windows], *self.shape)

    def tables(self) -> Iterator[np.ndarray]:
        """Yields arrays that determine the windows, for a digest of the data."""
        yield from (self.labels.ids, self.labels.offsets, self.before)
