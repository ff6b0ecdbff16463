"""The bytes of one record: the token ids of a sentence pair, or of one text.

A record is a row of little-endian unsigned integers: the number of source ids, the source ids, the
target ids. The record of a language model has no source ids. Integers have two bytes if all ids of
the vocabularies fit, else four.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.batching.packing import Tokens

_LARGEST_OF_TWO_BYTES = 0xFFFF


def id_bytes(vocabulary_size: int) -> int:
    """Returns the number of bytes of an integer of a record, 2 or 4.

    Args:
      vocabulary_size: number of ids of the larger vocabulary.
    """
    return 2 if vocabulary_size <= _LARGEST_OF_TWO_BYTES + 1 else 4


def encode(source: Sequence[int], target: Sequence[int], width: int) -> bytes:
    """Returns the record of a row.

    Args:
      source: ids of the source as an encoder reads them, with EOS; empty for a language model.
      target: ids to predict, with EOS.
      width: bytes of an integer, from `id_bytes`.

    Raises:
      UserError: an id, or the number of source ids, does not fit.
    """
    try:
        return np.asarray((len(source), *source, *target), _type(width)).tobytes()
    except OverflowError:
        largest = max(0, *source, *target)
        raise UserError(
            f"A record with integers of {width} bytes holds ids and numbers of source tokens up to "
            f"{np.iinfo(_type(width)).max:,}; this row has {len(source):,} source tokens, its "
            f"largest id is {largest:,} and its smallest {min((0, *source, *target)):,}"
        ) from None


def decode(records: Sequence[bytes], width: int) -> tuple[Tokens, Tokens]:
    """Returns the sources and the targets of records, in their order.

    Args:
      records: what `encode` returned for each row.
      width: bytes of an integer.

    Raises:
      UserError: a record is no result of `encode`; the message has its place in `records`.
    """
    bytes_of_record = np.fromiter(map(len, records), np.int64, len(records))
    damaged = (bytes_of_record == 0) | (bytes_of_record % width != 0)
    if damaged.any():
        place = int(damaged.argmax())
        raise UserError(
            f"record {place} has {bytes_of_record[place]} bytes; a positive multiple of {width} "
            "was expected"
        )
    values = np.frombuffer(b"".join(records), _type(width))
    sizes = bytes_of_record // width
    begins = np.cumsum(sizes) - sizes
    source_lengths = values[begins].astype(np.int64)
    target_lengths = sizes - 1 - source_lengths
    if (target_lengths < 0).any():
        place = int(target_lengths.argmin())
        raise UserError(
            f"record {place} has {sizes[place] - 1} tokens, and begins with a number of source "
            f"tokens of {source_lengths[place]}"
        )
    column = np.arange(len(values)) - np.repeat(begins, sizes)
    limits = np.repeat(source_lengths, sizes)
    sources = values[(column > 0) & (column <= limits)]
    targets = values[column > limits]
    return (
        Tokens.of(sources.astype(np.int32), source_lengths),
        Tokens.of(targets.astype(np.int32), target_lengths),
    )


def _type(width: int) -> np.dtype:
    return np.dtype(f"<u{width}")
