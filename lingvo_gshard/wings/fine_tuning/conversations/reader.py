"""ExampleReader: reads conversations and pairs from JSON lines and Parquet files."""

from __future__ import annotations

import collections
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import SILENT, Configurable, Params, Progress, UserError
from lingvo_gshard.data import CleaningReport, Row, held_out, readers
from lingvo_gshard.wings.fine_tuning.conversations.examples import FIELDS, example_of, pair_of
from lingvo_gshard.wings.preparation.cleaning import normalization

NO_JSON, NO_EXAMPLE = "no JSON object", "no example"
DUPLICATE = "a copy of an example before it"
_PARQUET = ".parquet"
_ROWS_AT_A_TIME = 1024


class ExampleReader(readers.FileReader):
    """Reads a conversation, or a prompt with its completion, from each line or row.

    Files whose names end in .parquet are Parquet. All others are JSON lines, plain or .bz2, .gz,
    .xz or .zst. The target of a row is the example as JSON.
    """

    files_help = "JSON lines or Parquet: a path or glob, or a list of them."
    # Raises UserError if the fields of a line are no example.
    check: Callable[[Mapping[str, Any]], object] = staticmethod(example_of)

    def _read_file(self, path: str) -> Iterator[Row]:
        fields = self._columns(path) if path.endswith(_PARQUET) else self._objects(path)
        for number, found in fields:
            try:
                self.check(found)
                text = json.dumps(found, ensure_ascii=False)
            except (ValueError, TypeError) as error:
                # Parquet has values that JSON has not, such as bytes.
                self._bad(f"{path}:{number}", NO_EXAMPLE, str(error))
                continue
            yield Row("", "", text, path, number)

    def _objects(self, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yields number and fields of each line that is not blank."""
        for number, line in enumerate(self._lines(path), self.first_line):
            if line is None or not line.strip():
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                self._bad(f"{path}:{number}", NO_JSON, str(error))
                continue
            if isinstance(found, dict):
                yield number, {k: v for k, v in found.items() if k in FIELDS and v is not None}
            else:
                self._bad(f"{path}:{number}", NO_JSON, type(found).__name__)

    def _columns(self, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yields number and fields of each row of a Parquet file."""
        if importlib.util.find_spec("pyarrow") is None:
            raise UserError(f"{path}: Parquet files need pyarrow: pip install pyarrow")
        import pyarrow
        import pyarrow.parquet

        number = 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                names = [name for name in file.schema_arrow.names if name in FIELDS]
                for batch in file.iter_batches(_ROWS_AT_A_TIME, columns=names):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, _without_nulls(row)
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            self._bad(f"{path}:{number + 1}", "the file cannot be read", str(error))

    def _divide(self, rows: list[Row]) -> held_out.Split:
        """Returns the rows divided by a hash of each example. Equal examples stay together."""
        divided: dict[str, list[Row]] = {split: [] for split in readers.SPLITS}
        for row in rows:
            divided[held_out.split_of(row.target, self.p.held_out_per_mille)].append(row)
        counters = {split: collections.Counter[str]() for split in divided}
        return held_out.Split(divided, counters, {split: {} for split in divided})


class PreferenceReader(ExampleReader):
    """Reads a prompt with a chosen and a rejected answer from each line or row."""

    check = staticmethod(pair_of)


def _without_nulls(value: Any) -> Any:
    """Returns a value of Parquet without nulls: all structs of a column have the same fields."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


class ExampleCleaner(Configurable):
    """Drops repeated examples. Texts stay as they are, byte for byte."""

    unicode_form = normalization.NFC

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("drop_duplicates", True, "Whether to drop repeated training examples.")
        return p

    def clean(
        self, rows: Sequence[Row], split: str, progress: Progress = SILENT
    ) -> tuple[list[Row], CleaningReport]:
        """Returns the rows kept and the report."""
        report = CleaningReport(split, read=len(rows))
        kept: list[Row] = []
        seen: set[str] = set()
        drops = self.p.drop_duplicates and split == "train"
        for row in rows:
            if drops and row.target in seen:
                report.drop(row, DUPLICATE)
            else:
                seen.add(row.target)
                kept.append(row)
        progress.update(len(rows), 1.0)
        report.keep(kept)
        return kept, report
