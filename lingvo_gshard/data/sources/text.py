"""Readers of plain text: documents of files, and the English side of the corpus in the package."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.data import held_out
from lingvo_gshard.data.sources import readers
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.sources.tsv import EmbeddedCorpus

FILE, LINE, PARAGRAPH = DOCUMENTS = ("file", "line", "paragraph")
IN_HELD_OUT = "a text, but for case, digits and punctuation, of test or dev"


class TextReader(readers.FileReader):
    """Documents of UTF-8 text, plain or compressed (.gz, .xz): rows without a source.

    `document` says what one is: a whole file, each line, or each paragraph, that is, lines up to
    one that is blank. What is blank altogether is no document.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("document", PARAGRAPH, "What a document is: 'file', 'line' or 'paragraph'.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        if self.p.document not in DOCUMENTS:
            raise ValueError(
                f"input.corpus.document cannot be {self.p.document!r}. "
                f"{names.nearest(self.p.document, DOCUMENTS)}"
            )

    def _read_file(self, path: str) -> Iterator[Row]:
        numbered = enumerate(self._lines(path), start=1)
        lines = ((number, line) for number, line in numbered if line is not None)
        for _, group in itertools.groupby(lines, key=self._part):
            numbers, texts = zip(*group, strict=True)
            text = "\n".join(texts)
            if text.strip():
                yield Row("", "", text, path, numbers[0])

    def _part(self, numbered: tuple[int, str]) -> object:
        """What neighbouring lines of one document have in common."""
        number, line = numbered
        if self.p.document == PARAGRAPH:
            return not line.strip()
        return number if self.p.document == LINE else 0


class EmbeddedEnglish(EmbeddedCorpus):
    """The English of the corpus in the package, each message once, as a row without a source.

    A message is a document: which of them stood together the corpus does not say. It is divided as
    the corpus is; what train has in common with dev or test, case, digits and punctuation aside, is
    left out of train.
    """

    def _read(self, split: str) -> Iterator[Row]:
        forbidden = set()
        if split == "train":
            for other in (name for name in readers.SPLITS if name != split):
                forbidden |= {held_out.fold(row.target) for row in super()._read(other)}
        seen = set()
        for row in super()._read(split):
            if row.target in seen:
                continue
            seen.add(row.target)
            if held_out.fold(row.target) in forbidden:
                message = f"{row.file}:{row.line}: {IN_HELD_OUT}"
                self._leave_out(IN_HELD_OUT, message)
            else:
                yield Row("en", "", row.target, row.file, row.line)
