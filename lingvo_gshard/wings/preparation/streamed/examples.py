"""Examples of data sets of Hugging Face, on disk or streamed, with positions that can be saved.

The library is https://huggingface.co/docs/datasets, extra `datasets`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from lingvo_gshard.core import Configurable, Params, UserError, names
from lingvo_gshard.data import readers
from lingvo_gshard.wings.preparation.formats import datasets as saved
from lingvo_gshard.wings.preparation.formats.fields import Fields

# Examples of a data set on disk that are read at a time.
_EXAMPLES_AT_A_TIME = 1000
_FIELDS = ("language", "target_language", "language_field", "source_field", "target_field")


class _OnDisk:
    """Examples of a data set that is on disk as a whole, known by their numbers."""

    def __init__(self, data: Any, state: Any):
        self._data, self._next = data, 0 if state is None else int(state)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        while self._next < len(self._data):
            columns = self._data[self._next : self._next + _EXAMPLES_AT_A_TIME]
            for values in zip(*columns.values(), strict=True):
                self._next += 1
                yield dict(zip(columns, values, strict=True))

    def get_state(self) -> int:
        return self._next


class _Streamed:
    """Examples that are streamed. The library knows the position."""

    def __init__(self, data: Any, state: Any):
        self._data, self._state = data, state
        if state is not None:
            data.load_state_dict(state)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for example in self._data:
            self._state = None
            yield example

    def get_state(self) -> Any:
        return self._data.state_dict() if self._state is None else self._state


# The examples of a split, once, from a position on. `get_state` returns the position after the last
# one that was yielded, as JSON values.
Examples: TypeAlias = _OnDisk | _Streamed


class DatasetReader(Configurable):
    """Opens the splits of a data set of Hugging Face.

    `path` is a directory that `save_to_disk` wrote, or what `datasets.load_dataset` takes: the name
    of a data set of the hub, or of a format such as "json" or "parquet" with `data_files`. The
    latter are streamed: nothing is copied or converted first.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("path", "", "A directory of save_to_disk, a name of the hub, or a format.")
        p.define("name", "", "Configuration of a data set of the hub.")
        p.define("revision", "", "Version of a data set of the hub, such as a commit.")
        p.define("data_files", (), "Files or globs of a format such as json.")
        p.define("train", "train", "Name of the split to train on.")
        p.define("dev", "", "Name of the split to measure the loss of; '': none.")
        p.define("test", "", "Name of the split to score; '': none.")
        fields = Fields()
        p.define("language", fields.language, "Language of examples that name none.")
        p.define("target_language", fields.target_language, "Language of the targets.")
        p.define("language_field", fields.language_field, "Field of the language.")
        p.define("source_field", fields.source_field, "Field of the source.")
        p.define("target_field", fields.target_field, "Field of the target.")
        p.define("text_field", fields.text_field, "Field of a text without a source.")
        return p

    def fields(self, is_text: bool) -> Fields:
        """Returns the fields that examples have."""
        values = {name: self.p.get(name) for name in (*_FIELDS, "text_field")}
        return Fields(is_text=is_text, **values)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits among train, dev and test that have a name."""
        return tuple(split for split in readers.SPLITS if self.p.get(split))

    def examples(self, split: str, state: Any = None) -> Examples:
        """Returns the examples of a split from a position on.

        Args:
          split: "train", "dev" or "test".
          state: a position that `get_state` of the examples gave; None for the beginning.

        Raises:
          UserError: there is no such data set or split, or the library is not installed.
        """
        if importlib.util.find_spec("datasets") is None:
            raise UserError(
                "Data sets of Hugging Face need the package datasets; pip install datasets "
                "installs it"
            )
        if not self.p.path:
            raise UserError(
                "input.dataset.path is empty; a directory that save_to_disk wrote, a name of the "
                "hub, or a format such as json was expected"
            )
        names.check(split, self.splits, f"input.dataset.{split} names no split")
        path = os.path.expanduser(self.p.path)
        if saved.is_saved(path):
            data = self._load_from_disk(path, split)
            wanted = self.fields(False).columns
            return _OnDisk(
                data.select_columns([c for c in data.column_names if c in wanted]), state
            )
        return _Streamed(self._stream(split), state)

    def _load_from_disk(self, path: str, split: str) -> Any:
        import datasets  # pyright: ignore[reportMissingImports]

        found = datasets.load_from_disk(path)
        if not isinstance(found, datasets.DatasetDict):
            if split != "train":
                raise UserError(f"{path} is one split: input.dataset.{split} cannot name another")
            return found
        name = self.p.get(split)
        names.check(name, [*map(str, found)], f"input.dataset.{split} = {name!r}")
        return found[name]

    def _stream(self, split: str) -> Any:
        import datasets  # pyright: ignore[reportMissingImports]

        p = self.p
        try:
            return datasets.load_dataset(
                p.path,
                p.name or None,
                data_files=list(names.listed(p.data_files)) or None,
                revision=p.revision or None,
                split=p.get(split),
                streaming=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"input.dataset.path = {p.path!r} cannot be read: {error}") from error
