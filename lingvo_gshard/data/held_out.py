"""Divides rows into train, dev and test so that no test sentence leaks into train.

Several languages share one target sentence, and many messages are near copies of each other. A row
is therefore assigned by a hash of its target's words, ignoring case, digits and punctuation.
Afterwards dev and test lose the rows whose source also occurs in train (same language, same
folding) and those whose target shares half or more of its word 4-grams with train. These rows are
counted.
"""

import collections
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

from lingvo_gshard.data.sources.report import excerpt, place
from lingvo_gshard.data.sources.row import Row

_WORD = re.compile(r"[^\W\d_]+")
_GRAM = 4

SOURCE_IN_TRAIN = "held out, but its source is in train"
TARGET_OVERLAPS = "held out, but half of its target's 4-grams are in train"


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows divided into splits.

    Attributes:
      rows: split -> its rows.
      dropped: split -> reason -> number of rows dropped.
      examples: split -> reason -> the first row dropped for it: file, line and target.
    """

    rows: dict[str, list[Row]]
    dropped: dict[str, collections.Counter[str]]
    examples: dict[str, dict[str, str]]


def fold(text: str) -> str:
    """Returns the words of a text in lower case, without digits and punctuation."""
    return " ".join(_WORD.findall(text.casefold())) or text.casefold().strip()


def split_of(target: str, per_mille: int) -> str:
    """Returns the split of a target sentence, which depends only on its folded words."""
    return _split_of_words(fold(target), per_mille)


def _split_of_words(folded: str, per_mille: int) -> str:
    digest = hashlib.sha256(folded.encode("utf-8")).digest()
    bucket = int.from_bytes(digest[:8], "big") % 1000
    return "test" if bucket < per_mille else "dev" if bucket < 2 * per_mille else "train"


def divide(rows: Sequence[Row], per_mille: int) -> Split:
    """Divides rows. Dev and test get `per_mille` thousandths of the target sentences each."""
    divided: dict[str, list[Row]] = {"train": [], "dev": [], "test": []}
    folded = {target: fold(target) for target in {row.target for row in rows}}
    splits = {target: _split_of_words(words, per_mille) for target, words in folded.items()}
    for row in rows:
        divided[splits[row.target]].append(row)
    held_out = [*divided["dev"], *divided["test"]]
    sources = _sources_in_both(divided["train"], held_out)
    grams = _grams_in_both(
        [words for target, words in folded.items() if splits[target] == "train"],
        [words for target, words in folded.items() if splits[target] != "train"],
    )
    dropped = {split: collections.Counter() for split in divided}
    examples: dict[str, dict[str, str]] = {split: {} for split in divided}
    for split in ("dev", "test"):
        targets = {row.target for row in divided[split]}
        overlaps = {target: _overlaps(folded[target], grams) for target in targets}
        kept = []
        for row in divided[split]:
            if row.source and (row.language, fold(row.source)) in sources:
                reason = SOURCE_IN_TRAIN
            elif overlaps[row.target]:
                reason = TARGET_OVERLAPS
            else:
                kept.append(row)
                continue
            dropped[split][reason] += 1
            examples[split].setdefault(reason, f"{place(row)}: {excerpt(row.target)}")
        divided[split] = kept
    return Split(divided, dropped, examples)


def _sources_in_both(train: Sequence[Row], held_out: Sequence[Row]) -> set[tuple[str, str]]:
    """Returns the language and the folded source of held-out rows that train has, too.

    Folding all of train takes long, so that is left to rows whose first word is a held-out one's.
    """
    # Rows of plain text have no source.
    wanted = {(row.language, fold(row.source)) for row in held_out if row.source}
    first = {(row.language, _first_word(row.source)) for row in held_out if row.source}
    return wanted.intersection(
        (row.language, fold(row.source))
        for row in train
        if row.source and (row.language, _first_word(row.source)) in first
    )


def _first_word(text: str) -> str:
    found = _WORD.search(text.casefold())
    return found[0] if found else ""


def _grams_in_both(train: Iterable[str], held_out: Iterable[str]) -> set[tuple[str, ...]]:
    """Returns the word 4-grams that folded targets of train and held-out ones have."""
    wanted = set().union(*map(_grams, held_out))
    return set().union(*(wanted.intersection(_grams(words)) for words in train))


def _grams(folded: str) -> Iterator[tuple[str, ...]]:
    words = folded.split()
    return zip(*(words[start:] for start in range(_GRAM)), strict=False)


def _overlaps(folded: str, seen: set[tuple[str, ...]]) -> bool:
    grams = set(_grams(folded))
    return bool(grams) and 2 * len(grams & seen) >= len(grams)
