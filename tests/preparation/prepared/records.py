"""Writes records, and compares files with a manifest, by the format's description alone."""

from __future__ import annotations

import hashlib
import pathlib
import struct
from collections.abc import Sequence

from lingvo_gshard.wings.preparation.prepared.manifest import Manifest
from lingvo_gshard.wings.preparation.prepared.shard_writer import ShardWriter


def encode(source: Sequence[int], target: Sequence[int], width: int = 2) -> bytes:
    """Returns the record of a row."""
    values = [len(source), *source, *target]
    return struct.pack(f"<{len(values)}{ {2: 'H', 4: 'I'}[width] }", *values)


def write(writer: ShardWriter, source: Sequence[int], target: Sequence[int]) -> None:
    """Appends a row to a shard."""
    writer.write_record(encode(source, target), len(source), len(target))


def differing(made: Manifest, directory: pathlib.Path) -> list[str]:
    """Returns the files of a directory that are not as its manifest says."""
    shards = [shard for found in made.splits.values() for shard in found]
    stated = {shard.file: (shard.bytes, shard.sha256) for shard in shards}
    stated |= {shard.lengths: (shard.lengths_bytes, shard.lengths_sha256) for shard in shards}
    for each in made.vocabularies:
        (name,) = each.files
        stated[name] = (directory / name).stat().st_size, each.sha256
    contents = {name: (directory / name).read_bytes() for name in stated}
    found = {name: (len(c), hashlib.sha256(c).hexdigest()) for name, c in contents.items()}
    return [name for name in stated if stated[name] != found[name]]
