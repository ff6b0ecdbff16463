"""Divides rows into train, dev and test so that no test sentence leaks into train.

Several languages share one target sentence, and many messages are near copies of each other. A row
is therefore assigned by a hash of its target's words, ignoring case, digits and punctuation.
Afterwards dev and test lose the rows whose source also occurs in train (same language, same
folding) and the rows whose target shares half or more of its word 4-grams with train. These rows
are counted. Features at the seam LEAKS find them, such as `wings/preparation/cleaning/leaks.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence

from lingvo_gshard.core.seams import Seam
from lingvo_gshard.data.sources.report import excerpt, place
from lingvo_gshard.data.sources.row import Row

# A feature takes the rows of train and the held-out rows, and returns why each held-out row is
# dropped; "" if it is kept.
LEAKS: Seam[Callable[[Sequence[Row], Sequence[Row]], list[str]]] = Seam("leaks")

_WORD = re.compile(r"[^\W\d_]+")


def fold(text: str) -> str:
    """Returns the words of a text in lower case, without digits and punctuation.

    If a text has no words, its digits and punctuation stay.
    """
    folded = text.casefold()
    return " ".join(_WORD.findall(folded) or folded.split())


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


def split_of(target: str, per_mille: int) -> str:
    """Returns the split of a target sentence, which depends only on its folded words."""
    digest = hashlib.sha256(fold(target).encode("utf-8", "surrogatepass")).digest()
    bucket = int.from_bytes(digest[:8], "big") % 1000
    return "test" if bucket < per_mille else "dev" if bucket < 2 * per_mille else "train"


def divide(rows: Sequence[Row], per_mille: int) -> Split:
    """Divides rows. Dev and test get `per_mille` thousandths of the target sentences each."""
    divided: dict[str, list[Row]] = {"train": [], "dev": [], "test": []}
    splits = {target: split_of(target, per_mille) for target in {row.target for row in rows}}
    for row in rows:
        divided[splits[row.target]].append(row)
    held_out = [*divided["dev"], *divided["test"]]
    reasons = [""] * len(held_out)
    for leaks in LEAKS:
        found = leaks(divided["train"], held_out)
        reasons = [before or now for before, now in zip(reasons, found, strict=True)]
    left = iter(reasons)
    dropped = {split: collections.Counter() for split in divided}
    examples: dict[str, dict[str, str]] = {split: {} for split in divided}
    for split in ("dev", "test"):
        kept = []
        for row, reason in zip(divided[split], left, strict=False):
            if not reason:
                kept.append(row)
                continue
            dropped[split][reason] += 1
            examples[split].setdefault(reason, f"{place(row)}: {excerpt(row.target)}")
        divided[split] = kept
    return Split(divided, dropped, examples)
