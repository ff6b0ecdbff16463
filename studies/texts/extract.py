"""Extracts the text of documentation in English: one JSON object `{"text": ...}` for each file.

    python3 extract.py OUTPUT.jsonl DIRECTORY...

HTML, reStructuredText and plain text are read, also compressed by gzip. It needs Python alone.
"""

from __future__ import annotations

import argparse
import gzip
import html.parser
import json
import os
import pathlib
import re
from collections.abc import Iterator

# Elements whose content is no text of a page.
_LEFT_OUT = frozenset("script style head nav header footer svg math form button select".split())
# Elements that have no end.
_VOID = frozenset("br hr img input link meta area base col embed source track wbr".split())
_BLOCKS = frozenset(
    "p div section article li dt dd tr td th h1 h2 h3 h4 h5 h6 pre table ul ol dl br hr "
    "blockquote figure figcaption details summary main aside".split()
)
# Parts of paths that say that a file is in another language. GNOME's English is /help/C/.
_CODES = (
    "be bg bn ca cs da de el eo es et eu fa fi fr gl hr hu hy it ja ka kk km ko lt lv mk nb nl nn "
    "pl pt ro ru sk sq sr sv ta te th tr uk vi zh"
)
_OTHER_LANGUAGE = re.compile(
    rf"/(?:{'|'.join(_CODES.split())})(?:[_-][A-Za-z]{{2,4}})?/|/help/(?!C/)"
)
# Lists of names, which are no sentences.
_INDEX = re.compile(r"(?:index-?all|genindex|modindex|search|all-?items|print|toc|-tree|-use)\b")
_ENDINGS = (".html", ".htm", ".xhtml", ".rst", ".txt", ".page")
_LEAST_WORDS = 40
# Longer pages list what other pages say. A line of prepared data ends at 1 MiB.
_MOST_CHARACTERS = 500_000


class _Text(html.parser.HTMLParser):
    """Collects the text of a page, a line for each block."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._left_out = 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        del attrs
        if tag in _LEFT_OUT:
            self._left_out += 1
        if tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _LEFT_OUT and self._left_out:
            self._left_out -= 1
        if tag in _BLOCKS and tag not in _VOID:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._left_out:
            self.pieces.append(data)


def text_of(name: str, content: str) -> str:
    """Returns the text of a file, with white space made single and a line for each block."""
    if name.endswith((".html", ".htm", ".xhtml", ".page")):
        page = _Text()
        page.feed(content)
        page.close()
        content = "".join(page.pieces)
    lines = (" ".join(line.split()) for line in content.split("\n"))
    return "\n".join(line for line in lines if line)


def texts(directory: pathlib.Path) -> Iterator[str]:
    """Yields the texts of the files in a directory, without lists, which are short or very long."""
    for parent, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            plain = name.removesuffix(".gz")
            if os.path.islink(path) or not plain.endswith(_ENDINGS) or _INDEX.search(plain):
                continue
            if _OTHER_LANGUAGE.search(path.removeprefix(os.fspath(directory))):
                continue
            opened = gzip.open if name.endswith(".gz") else open
            with opened(path, "rb") as file:
                found = text_of(plain, file.read().decode("utf-8", "replace"))
            if len(found) > _MOST_CHARACTERS or len(found.split()) < _LEAST_WORDS:
                continue
            if "\ufffd" not in found and "\0" not in found:
                yield found


def main() -> None:
    """Writes the texts of the directories that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("directories", type=pathlib.Path, nargs="+")
    given = parser.parse_args()
    partial = given.output.with_suffix(".partial")
    count = size = 0
    with open(partial, "w", encoding="utf-8") as file:
        for directory in given.directories:
            for text in texts(directory):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                count, size = count + 1, size + len(text)
    os.replace(partial, given.output)
    print(f"{given.output}: {count:,} texts of {size:,} characters")


if __name__ == "__main__":
    main()
