"""The file of a saved program: a zip of exported functions and a record that describes them.

`program.json` is the record; `exported` holds what `jax.export.deserialize` reads. A platform whose
kernels the program uses has a body of its own, such as `exported-tpu`. This module does not import
TensorFlow, so that a program runs where TensorFlow is not installed. docs/programs.md describes the
file.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from lingvo_gshard.core import (
    UserError,
    atomic,
    explained,
    jax,
    objects,
    whole_number,
    write_atomically,
)
from lingvo_gshard.runtime import Array, LayerNames, Work, encoded_bodies

# Files with bodies for platforms have the second format, which earlier versions do not read.
FORMATS = (1, 2)
_RECORD, _EXPORTED = "program.json", "exported"
_NO_BODIES: Mapping[str, bytes] = MappingProxyType({})
# Programs of text and constants take a tenth of their size in a zip. A file that claims to hold far
# more than its own size was made to fill the memory.
_MOST_TIMES = 100
_LEAST_LIMIT = 1 << 28


class ProgramRecord(msgspec.Struct, kw_only=True, frozen=True):
    """The description of a program in its file. `Program` explains the other attributes.

    Attributes:
      mesh: axes and sizes, such as "data=4,model=2".
      device_order: "contiguous" or "topology".
      flags: XLA_FLAGS when the program was written.
      versions: package -> version, of the packages that wrote the program.
      work: None if it was not counted.
      layers: UNSET if they are unknown.
      platforms: jax's names of the platforms that run the program; UNSET in earlier files, which
        run on all.
      bodies: the platforms that have a body of their own, with kernels. All others run the portable
        one. UNSET if there are none.
      stamp: hash of the file's content except for the stamp.
    """

    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    donated: tuple[int, ...]
    mesh: str
    device_order: str
    partitioner: str
    strategy: str
    flags: str
    versions: dict[str, str]
    work: Work | None = None
    layers: LayerNames | msgspec.UnsetType = msgspec.UNSET
    platforms: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    bodies: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    digest: str = ""
    format: int = FORMATS[0]
    stamp: str = ""


class _Header(msgspec.Struct):
    """The part of a record that files of every format have."""

    format: int = 0


def write(
    path: str | os.PathLike,
    record: ProgramRecord,
    exported: bytes,
    bodies: Mapping[str, bytes] = _NO_BODIES,
) -> None:
    """Writes a record and exported functions as one zip. `bodies` by platform have kernels."""
    if bodies:
        record = msgspec.structs.replace(record, bodies=tuple(sorted(bodies)), format=FORMATS[1])
    record = msgspec.structs.replace(record, stamp=stamp(record, exported, bodies))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(_RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1))
        file.writestr(_EXPORTED, exported)
        for platform, body in sorted(bodies.items()):
            file.writestr(_entry(platform), body)
    write_atomically(os.fspath(path), content.getvalue())


def read(path: str | os.PathLike) -> tuple[ProgramRecord, bytes, dict[str, bytes]]:
    """Returns the record, the portable function, and the functions with kernels by platform.

    Raises:
      UserError: names the file and the problem: it is no saved program, has another format, was
        changed, or was written with a newer jax.
    """
    content = io.BytesIO(objects.read_bytes(path))
    # zipfile raises many types on a damaged file.
    with explained(f"{path} is not a saved program", Exception):
        with zipfile.ZipFile(content) as file:
            _check_sizes(file, len(content.getvalue()))
            text, exported = file.read(_RECORD), file.read(_EXPORTED)
            found = atomic.decode(text, _Header).format
            if found in FORMATS:
                record = atomic.decode(text, ProgramRecord)
                own = () if record.bodies is msgspec.UNSET else record.bodies
                bodies = {platform: file.read(_entry(platform)) for platform in own}
    if found not in FORMATS:
        raise UserError(
            f"{path} has format {found}, but this version reads formats up to {FORMATS[-1]}"
        )
    if record.stamp != stamp(record, exported, bodies):
        raise UserError(f"{path} was changed after it was written: its hash is not its stamp")
    written_with = record.versions.get("jax", "0")
    if _numbers(jax.__version__) < _numbers(written_with):
        raise UserError(
            f"{path} was written with jax {written_with}. Install that version or a newer one; "
            f"this is jax {jax.__version__}"
        )
    return record, exported, bodies


def _entry(platform: str) -> str:
    return f"{_EXPORTED}-{platform}"


def _check_sizes(file: zipfile.ZipFile, compressed: int) -> None:
    """Raises ValueError if the content is far larger than any program of a file's size."""
    size = sum(entry.file_size for entry in file.infolist())
    if size > max(_MOST_TIMES * compressed, _LEAST_LIMIT):
        raise UserError(f"{compressed:,} bytes claim to hold {size:,}")


def encode(record: ProgramRecord) -> bytes:
    """Returns the record as JSON, equal bytes for equal records."""
    return msgspec.json.encode(record, order="deterministic")


def stamp(record: ProgramRecord, exported: bytes, bodies: Mapping[str, bytes] = _NO_BODIES) -> str:
    """Returns the hash of a file's content."""
    unstamped = msgspec.structs.replace(record, stamp="")
    content = (encode(unstamped), exported, *encoded_bodies(bodies))
    return hashlib.sha256(b"".join(content)).hexdigest()


def _numbers(version: str) -> tuple[int, ...]:
    found = map(whole_number, version.split(".")[:3])
    return tuple(number for number in found if number is not None)
