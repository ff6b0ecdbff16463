"""Reads row groups of Parquet files; needs the extra `parquet`."""

from __future__ import annotations

from collections.abc import Iterator

from lingvo_gshard.core.files import objects
from lingvo_gshard.core.files.problems import BucketError
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.preparation.inputs.part_readers import NO_FIELD, PartReader, fields_to_row

_ROWS_AT_A_TIME = 4096


class ParquetPart(PartReader):
    """Reads rows of a Parquet file; a row's line is its number in the file.

    The part's span counts row groups instead of bytes.
    """

    def _read_file(self, path: str) -> Iterator[Row]:
        make = fields_to_row(self._of)
        number = self.first_line
        for fields in self._fields(path):
            row = make(fields, path, number)
            if isinstance(row, str):
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
                columns = [name for name in file.schema_arrow.names if name in wanted]
                groups = range(span.begin, file.num_row_groups if span.end is None else span.end)
                for batch in file.iter_batches(_ROWS_AT_A_TIME, groups, columns):
                    yield from batch.to_pylist()
        except BucketError:
            raise
        except (pyarrow.ArrowException, OSError) as error:
            self._bad(f"{path}:{self.first_line}", "the file cannot be read", str(error))


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
