"""The words of a text: what is compared to find copies of a text and leaks between splits."""

import re

_WORD = re.compile(r"[^\W\d_]+")


def fold(text: str) -> str:
    """Returns the words of a text in lower case, without digits and punctuation.

    If a text has no words, its digits and punctuation stay.
    """
    folded = text.casefold()
    return " ".join(_WORD.findall(folded) or folded.split())
