"""Reads row groups of Parquet files; needs the extra `parquet`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lingvo_gshard.core.files import objects
from lingvo_gshard.core.files.problems import BucketError
from lingvo_gshard.data.sources.readers import LONG_LINE
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.preparation.inputs.part_readers import NO_FIELD, PartReader, fields_to_row

if TYPE_CHECKING:
    import pyarrow

_ROWS_AT_A_TIME = 4096


class ParquetPart(PartReader):
    """Reads rows of a Parquet file; a row's line is its number in the file.

    The part's span counts row groups instead of bytes.
    """

    def _read_file(self, path: str) -> Iterator[Row]:
        make = fields_to_row(self._of)
        number = self.first_line
        for fields in self._fields(path):
            longest = max((len(v) for v in fields.values() if isinstance(v, str)), default=0)
            row = make(fields, path, number)
            if longest > self._longest:
                self._bad(f"{path}:{number}", LONG_LINE, f"more than {self._longest_in_words()}")
            elif isinstance(row, str):
                self._bad(f"{path}:{number}", NO_FIELD, row)
            else:
                yield row
            number += 1

    def _fields(self, path: str) -> Iterator[dict[str, object]]:
        # pyarrow starts threads, which processes that are forked would lack.
        import pyarrow
        import pyarrow.parquet

        of, span = self._of, self._piece.spans[0]
        try:
            with objects.open_to_read(path) as stored, pyarrow.parquet.ParquetFile(stored) as file:
                wanted = {of.language_field, of.source_field, of.target_field, of.text_field}
                schema = file.schema_arrow
                columns = [name for name in schema.names if name in wanted]
                texts = [
                    name for name in columns if pyarrow.types.is_string(schema.field(name).type)
                ]
                groups = range(span.begin, file.num_row_groups if span.end is None else span.end)
            # A text that a page states once stays one text, however many rows have it.
            with (
                objects.open_to_read(path) as stored,
                pyarrow.parquet.ParquetFile(stored, read_dictionary=texts) as file,
            ):
                for batch in file.iter_batches(_ROWS_AT_A_TIME, groups, columns):
                    values = (_values(column) for column in batch.columns)
                    for row in zip(*values, strict=True):
                        yield dict(zip(columns, row, strict=True))
        except BucketError:
            raise
        except (pyarrow.ArrowException, OSError) as error:
            self._bad(f"{path}:{self.first_line}", "the file cannot be read", str(error))


def _values(column: pyarrow.Array) -> list[object]:
    """Returns the values of a column. Rows with the same text share one string."""
    import pyarrow

    if not pyarrow.types.is_dictionary(column.type):
        return column.to_pylist()
    texts = column.dictionary.to_pylist()
    return [None if index is None else texts[index] for index in column.indices.to_pylist()]


def row_groups(path: str) -> list[int]:
    """Returns the number of rows of each row group; none if the file is damaged."""
    import pyarrow
    import pyarrow.parquet

    try:
        with objects.open_to_read(path) as stored, pyarrow.parquet.ParquetFile(stored) as file:
            metadata = file.metadata
            return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except BucketError:
        raise
    except (pyarrow.ArrowException, OSError):
        return []
