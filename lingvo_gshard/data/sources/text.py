"""Readers of plain text: documents in files, and the English side of the embedded corpus."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.data.held_out import fold
from lingvo_gshard.data.sources import readers
from lingvo_gshard.data.sources.report import excerpt, place
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.sources.tsv import EmbeddedCorpus

FILE, LINE, PARAGRAPH = DOCUMENTS = ("file", "line", "paragraph")
IN_HELD_OUT = "a text, but for case, digits and punctuation, of test or dev"


class TextReader(readers.FileReader):
    """Reads documents of UTF-8 text, plain or .bz2, .gz, .xz or .zst, as rows without a source.

    A document is a file, a line or a paragraph, as `document` chooses. Blank lines separate
    paragraphs. A document without any text is ignored.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        about = "The unit of a document: 'file', 'line' or 'paragraph'."
        p.define("document", PARAGRAPH, about, choices=DOCUMENTS)
        return p

    def _read_file(self, path: str) -> Iterator[Row]:
        numbered = enumerate(self._lines(path), self.first_line)
        lines = ((number, line) for number, line in numbered if line is not None)
        for _, group in itertools.groupby(lines, key=self._part):
            numbers, texts = zip(*group, strict=True)
            text = "\n".join(texts)
            if text.strip():
                yield Row("", "", text, path, numbers[0])

    def _part(self, numbered: tuple[int, str]) -> object:
        """Returns a key that adjacent lines share if and only if they are in the same document."""
        number, line = numbered
        if self.p.document == PARAGRAPH:
            return not line.strip()
        return number if self.p.document == LINE else 0


class EmbeddedEnglish(EmbeddedCorpus):
    """Reads the English side of the embedded corpus as rows without a source, each message once.

    Each message is a document, since the corpus does not record which messages belong together.
    The corpus defines the splits. A message of train that also occurs in dev or test is left out of
    train; case, digits and punctuation do not count in this comparison.
    """

    def _read(self, split: str) -> Iterator[Row]:
        forbidden = set()
        if split == "train":
            for other in (name for name in readers.SPLITS if name != split):
                forbidden |= {fold(row.target) for row in super()._read(other)}
        seen = set()
        for row in super()._read(split):
            if row.target in seen:
                continue
            seen.add(row.target)
            if fold(row.target) in forbidden:
                self._leave_out(IN_HELD_OUT, f"{place(row)}: {excerpt(row.target)}")
            else:
                yield Row("en", "", row.target, row.file, row.line)
