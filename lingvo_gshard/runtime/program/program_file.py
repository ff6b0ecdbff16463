"""The file of a saved program: a zip of what jax.export reads and of a stamped record of the rest.

Needs jax alone, as whoever runs such a file does; docs/programs.md says what is in it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pathlib
import zipfile

import jax

from lingvo_gshard.data.sources.files import write_atomically

_FORMAT = 1
_RECORD, _EXPORTED = "program.json", "exported"


def write(path: str | os.PathLike, record: dict, exported: bytes) -> None:
    """Writes a record, of JSON values, and an exported function's bytes as one zip."""
    record = {"format": _FORMAT, **record}
    record["stamp"] = _stamp(record, exported)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(_RECORD, json.dumps(record, indent=1))
        file.writestr(_EXPORTED, exported)
    write_atomically(path, content.getvalue())


def read(path: str | os.PathLike) -> tuple[dict, bytes]:
    """Returns the record and the exported function's bytes.

    Raises ValueError naming the file and what does not match: format, content, or a jax older than
    the writer's.
    """
    content = io.BytesIO(pathlib.Path(path).read_bytes())
    try:
        with zipfile.ZipFile(content) as file:
            record = dict(json.loads(file.read(_RECORD)))
            exported = file.read(_EXPORTED)
    except Exception as error:  # Damage makes zipfile raise errors of many kinds.
        raise ValueError(f"{path} is not a saved program: {error}") from None
    if record.get("format") != _FORMAT:
        raise ValueError(f"{path}: format {record.get('format')}, but this reads {_FORMAT}")
    if record.get("stamp") != _stamp(record, exported):
        raise ValueError(f"{path}: the content has another hash than the file's stamp says")
    written_with = record["versions"].get("jax", "0")
    if _numbers(jax.__version__) < _numbers(written_with):
        raise ValueError(
            f"{path}: written with jax {written_with}; jax {jax.__version__} is older and may not "
            "know its operations"
        )
    return record, exported


def _stamp(record: dict, exported: bytes) -> str:
    """A hash of all that a file holds beside this stamp."""
    rest = {name: value for name, value in record.items() if name != "stamp"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode() + exported).hexdigest()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
