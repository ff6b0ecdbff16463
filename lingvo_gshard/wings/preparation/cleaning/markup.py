"""Policy: what becomes of rows with markup or with placeholders."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

KEEP, DROP, EQUAL = POLICIES = ("keep", "drop", "equal")

# Tags of HTML and XML, numbered tags of catalogs (<0>...</0>), and character references.
_MARKUP = re.compile(
    r"</?(?:[A-Za-z][\w:.-]*|\d{1,2})(?:\s[^<>]{0,300})?/?>|&(?:[A-Za-z]{2,12}|\#\d{1,7}|\#x[\da-fA-F]{1,6});"
)
_TAG_NAME = re.compile(r"</?[\w:.-]+|&.*")
_PLACEHOLDER = re.compile(
    # printf: %s, %1$s, %-5.2f, %ld, %(name)s. A space as a flag would match "50% of".
    r"%%|%\(\w+\)[-+#0]*\d*(?:\.\d+)?[a-zA-Z]"
    r"|%(?:\d+\$)?[-+#0]*\d*(?:\.\d+)?(?:hh?|ll?|[zjtqL])?[diouxXeEfgGcsp@](?![a-zA-Z])"
    # Ruby: %{name}. Qt: %1, %L1, %n.
    r"|%\{\w+\}|%L?\d{1,2}(?!\d)|%n(?![a-zA-Z])"
    # Python, ICU, Mustache and JavaScript: {name}, {0}, {{name}}, ${name}.
    r"|\$?\{\{?[^{}]{0,80}\}?\}"
    # Shells: $NAME. Automake: @NAME@.
    r"|\$[A-Za-z_]\w*|@[A-Za-z_]\w*@"
)
_POSITION = re.compile(r"^%\d+\$")


class Kind(NamedTuple):
    """A kind of text that is no language.

    Attributes:
      name: name of the hyperparameter that holds the policy.
      find: returns the things of this kind in a text, so that equal things compare equal.
      present: the reason for dropping rows with text of this kind.
      unequal: the reason for dropping rows whose sides differ in this kind.
    """

    name: str
    find: Callable[[str], list[str]]
    present: str
    unequal: str


class Policy:
    """Decides whether a row is dropped for a kind of text that its sides have."""

    def __init__(self, kind: Kind, policy: str):
        """Prepares the policy on a kind of text.

        Args:
          policy: "keep" drops no row. "drop" drops rows with text of this kind. "equal" drops rows
            whose sides differ in this kind.
        """
        self.is_on = policy != KEEP
        self._find, self._is_drop = kind.find, policy == DROP
        self._reason = kind.present if self._is_drop else kind.unequal

    def __call__(self, source: str, target: str) -> str:
        """Returns why a row is dropped; "" if it is kept."""
        left, right = self._find(source), self._find(target)
        if not left and not right:
            return ""
        return self._reason if self._is_drop or sorted(left) != sorted(right) else ""


def markup(text: str) -> list[str]:
    """Returns the tags and character references of a text. Attributes are left out."""
    if "<" not in text and "&" not in text:
        return []
    found = _MARKUP.findall(text)
    return [name[0] for tag in found if (name := _TAG_NAME.match(tag))]


def placeholders(text: str) -> list[str]:
    """Returns the placeholders of a text, without positions, since translations reorder them."""
    if not _may_have_placeholder(text):
        return []
    return [_POSITION.sub("%", found) for found in _PLACEHOLDER.findall(text) if found != "%%"]


_may_have_placeholder = re.compile(r"[%{$@]").search
MARKUP = Kind("markup", markup, "a side has markup", "the sides' markup differs")
PLACEHOLDERS = Kind(
    "placeholders", placeholders, "a side has placeholders", "the sides' placeholders differ"
)
