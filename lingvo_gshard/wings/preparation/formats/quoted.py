"""Reader of rows whose fields may be quoted: CSV, and TSV as spreadsheets write it."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from lingvo_gshard.core import Params, UserError, nearest
from lingvo_gshard.data import Row, readers, tsv

DELIMITERS = {"comma": ",", "tab": "\t", "semicolon": ";"}
_BAD_QUOTES = "quotes that do not fit"
_COLUMNS = "wrong number of columns"
_LONGEST_FIELD = 1 << 24
_SETTINGS = (
    "Rows that name no language need language=CODE; source_field and target_field name the columns "
    "of a first row"
)
# A file may have no row of names if no other ones are set.
_USUAL = ("", "language", "source", "target", "text")


class QuotedReader(readers.FileReader):
    """Reads rows of fields in quotes (RFC 4180), plain or .bz2, .gz, .xz or .zst.

    A first row with the names of `source_field` and `target_field` says where these columns are.
    Without it, the columns are language, source and target, or source and target with `language`.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        about = f"What is between fields: {', '.join(DELIMITERS)}."
        p.define("delimiter", "comma", about, choices=tuple(DELIMITERS))
        p.define("language", "", "Language of rows that name none.")
        p.define("language_field", "language", "Name of the column of languages.")
        p.define("source_field", "source", "Name of the column of sources; '': there is none.")
        p.define("target_field", "target", "Name of the column of targets.")
        return p

    def _read_file(self, path: str) -> Iterator[Row]:
        csv.field_size_limit(_LONGEST_FIELD)
        p = self.p
        # A bad line has been counted.
        lines = (f"{line}\n" for line in self._lines(path) if line is not None)
        found = csv.reader(lines, delimiter=DELIMITERS[p.delimiter], strict=True)
        places: dict[str, int] | None = None
        while True:
            line = found.line_num + 1
            try:
                fields = next(found)
            except StopIteration:
                return
            except csv.Error as error:
                self._bad(f"{path}:{line}", _BAD_QUOTES, str(error))
                continue
            if line == 1:
                places = self._places(fields, path)
                if places is not None or tsv.names_columns(fields):
                    self._leave_out(tsv.HEADER, f"{path}:1: {', '.join(fields)[:80]!r}")
                    continue
            if fields:
                yield from self._row(fields, places, path, line)

    def _places(self, fields: list[str], path: str) -> dict[str, int] | None:
        """Returns the place of each side if a row names the columns, else None."""
        p, places = self.p, {name.strip(): place for place, name in enumerate(fields)}
        for field in ("language_field", "source_field", "target_field"):
            if p.get(field) not in (*_USUAL, *places):
                near = nearest(p.get(field), places)
                raise UserError(f"{path}:1: {field}={p.get(field)!r} names no column. {near}")
        wanted = {"source": p.source_field, "target": p.target_field}
        if not all(name in places for name in wanted.values() if name):
            return None
        wanted["language"] = p.language_field
        return {side: places[name] for side, name in wanted.items() if name in places}

    def _row(
        self, fields: list[str], places: dict[str, int] | None, path: str, line: int
    ) -> Iterator[Row]:
        p, are_named = self.p, places is not None
        if places is None:
            order = [] if p.language else ["language"]
            order += ["source", "target"] if p.source_field else ["target"]
            places = {side: place for place, side in enumerate(order)}
        count = max(places.values()) + 1
        if len(fields) < count or len(fields) > count and not are_named:
            wanted = f"{len(fields)}, expected {count} ({', '.join(places)}). {_SETTINGS}"
            self._bad(f"{path}:{line}", _COLUMNS, wanted)
            return
        language = fields[places["language"]] if "language" in places else p.language
        if p.source_field and not language:
            self._bad(f"{path}:{line}", "no language code", _SETTINGS)
            return
        source = fields[places["source"]] if "source" in places else ""
        yield Row(language, source, fields[places["target"]], path, line)
