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
from collections.abc import Sequence

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
    digest = hashlib.sha256(fold(target).encode("utf-8")).digest()
    bucket = int.from_bytes(digest[:8], "big") % 1000
    return "test" if bucket < per_mille else "dev" if bucket < 2 * per_mille else "train"


def divide(rows: Sequence[Row], per_mille: int) -> Split:
    """Divides rows. Dev and test get `per_mille` thousandths of the target sentences each."""
    divided: dict[str, list[Row]] = {"train": [], "dev": [], "test": []}
    splits = {target: split_of(target, per_mille) for target in {row.target for row in rows}}
    for row in rows:
        divided[splits[row.target]].append(row)
    # Rows of plain text have no source.
    sources = {(row.language, fold(row.source)) for row in divided["train"] if row.source}
    grams = set().union(*(_grams(target) for target in {r.target for r in divided["train"]}))
    dropped = {split: collections.Counter() for split in divided}
    examples: dict[str, dict[str, str]] = {split: {} for split in divided}
    for split in ("dev", "test"):
        overlaps = {t: _overlaps(t, grams) for t in {row.target for row in divided[split]}}
        kept = []
        for row in divided[split]:
            if (row.language, fold(row.source)) in sources:
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


def _grams(text: str) -> set[tuple[str, ...]]:
    words = fold(text).split()
    return {tuple(words[i : i + _GRAM]) for i in range(len(words) - _GRAM + 1)}


def _overlaps(text: str, seen: set[tuple[str, ...]]) -> bool:
    grams = _grams(text)
    return bool(grams) and 2 * len(grams & seen) >= len(grams)
