"""PublishedRecord: what an import keeps of the published tensors, so that an export equals them."""

from __future__ import annotations

import pathlib

import msgspec

from lingvo_gshard.core.files import json_text
from lingvo_gshard.data.published_vocabulary import RECORD_FILE

__all__ = ["RECORD_FILE", "PublishedRecord", "read_record"]


class PublishedRecord(msgspec.Struct, frozen=True):
    """The content of published.json.

    Attributes:
      model_type: name of the family.
      dtypes: name of each tensor -> its published type.
    """

    model_type: str
    dtypes: dict[str, str]


def read_record(directory: pathlib.Path) -> PublishedRecord | None:
    """Returns the record in a directory of a checkpoint; None for a run that was not imported."""
    try:
        return json_text.decode((directory / RECORD_FILE).read_bytes(), PublishedRecord)
    except FileNotFoundError:
        return None
