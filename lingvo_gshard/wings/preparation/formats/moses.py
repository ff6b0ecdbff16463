"""Reader of Moses pairs: two files, named by their languages, whose lines correspond."""

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.data import Row, compression, readers

UNEQUAL = "sides of unequal length"
_COMPRESSED = ("", *compression.SUFFIXES)
# The name of a pair, as OPUS has it in Corpus.de-en.de.
_PAIR = re.compile(r"(?:^|[./_-])([A-Za-z]{2,3}(?:_\w+)?)-([A-Za-z]{2,3}(?:_\w+)?)$")
# Ends of names that look like codes of languages, and mean the kind of a file.
_OTHER_FILES = frozenset(
    "bak cfg csv dat doc err htm idx ids ini log lst md out pdf rst sgm sha tar tmp tmx tsv txt "
    "xml yml zip".split()
)
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:[_-][A-Za-z0-9]{2,8})*(?:@[A-Za-z]+)?")


class MosesReader(readers.FileReader):
    """Reads pairs of files such as `PREFIX.de` and `PREFIX.en`, plain or .bz2, .gz, .xz or .zst.

    The extension of the source file is its language. The prefix `data/train` finds `data/train.en`
    and every `data/train.<language>`; `europarl/*/train` finds such files in all directories. If
    two sides differ in length, their lines do not correspond: skipping leaves out both files.

    A prefix that names its pair, such as `Corpus.de-en`, has that source language only. Files such
    as `train.txt` and `Corpus.de-en.ids` are no sides; `file_notes` names them.
    """

    files_help = "a prefix such as data/train, a glob of prefixes, or a list of them."

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("target_language", "en", "Extension of the target files.")
        p.define("source_language", "", "The only source language to read; '': all that are found.")
        return p

    def _expand(self, pattern: str) -> list[str]:
        """Returns the target files of a prefix; a missing one is kept, so that it is reported."""
        end = f".{self.p.target_language}"
        found = [path for c in _COMPRESSED for path in glob.glob(f"{pattern}{end}{c}")]
        if self.p.source_language and glob.has_magic(pattern):
            # Of all pairs that a glob finds, those in this language are meant.
            found = [path for path in found if self.sources_of(path)]
        for path in found:
            if not self.sources_of(path):
                expected = f"{self._prefix(path)}.{self.p.source_language or 'de'}"
                others = "" if self.p.source_language else ", or another language"
                raise UserError(
                    f"{path}: there is no source file for this target file: {expected} was "
                    f"expected{others}"
                )
        return sorted(found) or ([] if glob.has_magic(pattern) else [pattern + end])

    def _without_links(self, pattern: str, paths: Sequence[str]) -> Sequence[str]:
        """Returns all paths. One target file may be linked beside several source files."""
        del pattern
        return paths

    def _read_file(self, path: str) -> Iterator[Row]:
        for language, source in self.sources_of(path):
            yield from self._read_pair(language, source, path)

    def _prefix(self, path: str) -> str:
        return compression.without_suffix(path).removesuffix(f".{self.p.target_language}")

    def sources_of(self, path: str) -> list[tuple[str, str]]:
        """Returns (language, path) of the source files of a target file."""
        prefix = self._prefix(path)
        files = filter(os.path.isfile, sorted(glob.glob(f"{glob.escape(prefix)}.*")))
        return list(self.sides(prefix, list(files)).items())

    def sides(self, prefix: str, files: Sequence[str]) -> dict[str, str]:
        """Returns language -> path of the source files of a prefix, among some files."""
        target = self.p.target_language
        found: dict[str, str] = {}
        for source in (file for file in files if file.startswith(f"{prefix}.")):
            language = compression.without_suffix(source)[len(prefix) + 1 :]
            if _LANGUAGE.fullmatch(language) and language != target:
                found.setdefault(language, source)
        if self.p.source_language:
            return {code: p for code, p in found.items() if code == self.p.source_language}
        others = [language for language in found if language.lower() in _OTHER_FILES]
        pair = _PAIR.search(prefix)
        if pair and target in pair.groups():
            source = pair[1] if pair[2] == target else pair[2]
            if source in found:
                others = [language for language in found if language != source]
        for language in others:
            self._file_notes[found[language]] = (
                f"{found[language]} is not read: it is no side of a pair. If {language} is a "
                "language, name it as the source's language"
            )
            del found[language]
        return found

    def _read_pair(self, language: str, source_path: str, target_path: str) -> Iterator[Row]:
        sources, targets = (list(self._lines(path)) for path in (source_path, target_path))
        if len(sources) != len(targets):
            counts = {source_path: len(sources), target_path: len(targets)}
            place, detail = difference(counts)
            self._bad(place, UNEQUAL, detail, count=max(counts.values()))
            return
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), start=1):
            if source is not None and target is not None:
                yield Row(language, source, target, source_path, number)


def difference(lines: Mapping[str, int]) -> tuple[str, str]:
    """Returns where the shorter of two files ends, and a text with the numbers of their lines."""
    short, long = sorted(lines, key=lines.__getitem__)
    return f"{short}:{lines[short] + 1}", (
        f"it ends after {lines[short]} lines, {long} after {lines[long]}"
    )
