"""Batches sentences for decoding in a few fixed shapes, and restores their order afterwards."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.data.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class DecodingBatch:
    """A batch of source sentences, one per row.

    Attributes:
      arrays: `source_ids`, `source_segments` and `source_positions`, int32 [B,L].
      indices: the number [B] of each row's sentence, -1 for an empty row.
    """

    arrays: dict[str, np.ndarray]
    indices: np.ndarray


@dataclasses.dataclass(frozen=True)
class DecodingBatches:
    """All batches of some sentences, short ones first.

    Attributes:
      batches: the batches.
      num_sentences: number of sentences.
      cut: indices of the sentences that were cut to fit.
    """

    batches: list[DecodingBatch]
    num_sentences: int
    cut: tuple[int, ...]

    def __iter__(self) -> Iterator[DecodingBatch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def in_order(self, results: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns one result per sentence, in the order of the sentences.

        Args:
          results: the results of each batch, one per row; those of empty rows are dropped.
        """
        ordered = [None] * self.num_sentences
        for batch, values in zip(self.batches, results, strict=True):
            for index, value in zip(batch.indices, values, strict=True):
                if index >= 0:
                    ordered[index] = value
        return ordered


def decoding_batches(
    sentences: Sequence[str],
    vocabulary: Vocabulary,
    lengths: Sequence[int] = (16, 32, 64, 128, 256),
    batch_tokens: int = 4096,
) -> DecodingBatches:
    """Batches sentences by length.

    Each sentence goes to the smallest of `lengths` that holds it and its EOS. Within a length,
    sentences are sorted, so that those of a batch end at about the same step. A sentence longer
    than the largest length is cut and keeps its EOS.

    Args:
      sentences: the sentences.
      vocabulary: encodes them.
      lengths: source lengths of batches, each one a shape to compile.
      batch_tokens: positions of a batch; one of length L has max(1, batch_tokens // L) rows.
    """
    lengths = sorted(lengths)
    if not lengths or lengths[0] < 1:
        raise ValueError(f"lengths must be positive, and at least one, not {lengths}")
    encoded = vocabulary.encode_batch(sentences)
    cut = tuple(i for i, ids in enumerate(encoded) if len(ids) >= lengths[-1])
    encoded = [ids[: lengths[-1] - 1] + [vocabulary.eos_id] for ids in encoded]
    token_counts = np.array([len(ids) for ids in encoded], np.int64)
    bucket_of = np.searchsorted(lengths, token_counts)
    batches = []
    for bucket, length in enumerate(lengths):
        members = np.flatnonzero(bucket_of == bucket)
        members = members[np.argsort(token_counts[members], kind="stable")]
        num_rows = max(1, batch_tokens // length)
        for begin in range(0, len(members), num_rows):
            batches.append(_batch(encoded, members[begin : begin + num_rows], num_rows, length))
    return DecodingBatches(batches, len(encoded), cut)


def _batch(encoded, members, num_rows, length):
    ids, segments = (np.zeros((num_rows, length), np.int32) for _ in range(2))
    for row, index in enumerate(members):
        ids[row, : len(encoded[index])] = encoded[index]
        segments[row, : len(encoded[index])] = 1
    positions = np.arange(length, dtype=np.int32) * segments
    indices = np.full(num_rows, -1)
    indices[: len(members)] = members
    arrays = {"source_ids": ids, "source_segments": segments, "source_positions": positions}
    return DecodingBatch(arrays, indices)
