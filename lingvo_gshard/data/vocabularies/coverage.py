"""Coverage: how well a vocabulary writes the text of each language."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.vocabulary import Vocabulary

TARGETS = "targets"
_ROWS_OF_A_LANGUAGE = 1000
_LISTED = 8
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Is in the text of a byte-level piece that is only a part of a character.
_PART = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Measures of a vocabulary on some text.

    Attributes:
      characters: number of characters, without white space.
      words: number of words, separated by white space.
      tokens: number of tokens.
      covered: share of the characters that are written with pieces, and not with bytes or as
        unknown.
    """

    characters: int
    words: int
    tokens: int
    covered: float

    @property
    def tokens_per_character(self) -> float:
        """Tokens for each character that is no white space."""
        return self.tokens / max(self.characters, 1)

    @property
    def tokens_per_word(self) -> float:
        """Tokens for each word; of no use for languages that do not separate words."""
        return self.tokens / max(self.words, 1)

    def to_json(self) -> dict[str, float]:
        """Returns all values, rounded to four digits after the point."""
        values = dataclasses.asdict(self) | {
            "tokens_per_character": self.tokens_per_character,
            "tokens_per_word": self.tokens_per_word,
        }
        return {name: round(value, 4) for name, value in values.items()}


def coverage(vocabulary: Vocabulary, texts: Mapping[str, Sequence[str]]) -> dict[str, Coverage]:
    """Returns the coverage of each language.

    Args:
      vocabulary: any vocabulary.
      texts: language -> its texts, such as the sample that the vocabulary was trained on.
    """
    known: dict[str, bool] = {}
    return {
        language: _of_language(vocabulary, lines, known)
        for language, lines in sorted(texts.items())
    }


def _of_language(vocabulary: Vocabulary, lines: Sequence[str], known: dict[str, bool]) -> Coverage:
    counts = collections.Counter(character for line in lines for character in "".join(line.split()))
    new = [character for character in counts if character not in known]
    for character, ids in zip(new, vocabulary.encode_batch(new), strict=True):
        known[character] = not any(_is_no_piece(vocabulary, index) for index in ids)
    covered = sum(n for character, n in counts.items() if known[character])
    return Coverage(
        characters=counts.total(),
        words=sum(len(line.split()) for line in lines),
        tokens=sum(map(len, vocabulary.encode_batch(lines))),
        covered=covered / max(counts.total(), 1),
    )


def _is_no_piece(vocabulary: Vocabulary, index: int) -> bool:
    if index == vocabulary.unk_id:
        return True
    piece = vocabulary.piece(index)
    return _PART in piece or bool(_BYTE.fullmatch(piece))


def of_rows(
    rows: Iterable[Row], source: Vocabulary, target: Vocabulary
) -> dict[str, dict[str, Coverage]]:
    """Returns how well the vocabularies write the first rows of each language.

    Args:
      rows: sentence pairs, or texts without sources.
      source: the vocabulary of sources.
      target: the vocabulary of targets.

    Returns:
      Side -> language -> coverage. The side is "joint" if the vocabularies are the same object,
      else "source" or "target". Targets of pairs are one language, TARGETS.
    """
    sources, targets = collections.defaultdict(list), collections.defaultdict(list)
    taken = collections.Counter()
    for row in rows:
        taken[row.language] += 1
        if taken[row.language] > _ROWS_OF_A_LANGUAGE:
            continue
        if row.source:
            sources[row.language].append(row.source)
        targets[TARGETS if row.source else row.language].append(row.target)
    if source is target:
        return {"joint": coverage(source, sources | targets)}
    return {"source": coverage(source, sources), "target": coverage(target, targets)}


def to_note(found: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a line about the languages that a vocabulary writes with most tokens; "" for one.

    Args:
      found: language -> what `to_json` returns.
    """
    if len(found) < 2:
        return ""
    worst = sorted(found, key=lambda language: -found[language]["tokens_per_character"])
    described = ", ".join(
        f"{language} {found[language]['tokens_per_character']:.2f} "
        f"({found[language]['covered']:.1%})"
        for language in worst[:_LISTED]
    )
    return f"Most tokens per character, and characters that have pieces: {described}"
