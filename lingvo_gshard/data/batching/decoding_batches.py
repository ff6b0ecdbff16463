"""Sentences to be translated, in batches of a few fixed shapes, and back in their order."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.data.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class DecodingBatch:
    """Sources alone, one to a row: int32 source_{ids,segments,positions} [B, L].

    `indices` [B] says which sentence each row is, -1 for an empty row.
    """

    arrays: dict[str, np.ndarray]
    indices: np.ndarray


@dataclasses.dataclass(frozen=True)
class DecodingBatches:
    """All batches of some sentences, short ones first, and the indices of those cut to fit."""

    batches: list[DecodingBatch]
    num_sentences: int
    cut: tuple[int, ...]

    def __iter__(self) -> Iterator[DecodingBatch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def in_order(self, results: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns one result per sentence, in the sentences' order.

        Takes for each batch, in order, its results by row; those of empty rows are dropped.
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
    """Batches sentences by length: each goes to the least of `lengths` that holds it and its EOS.

    A batch of length L has max(1, batch_tokens // L) rows, so there are as many shapes as lengths.
    Within a length the short ones come first, so that a batch's sentences end at about one step.
    A sentence too long for the greatest length is cut, its EOS kept.
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
