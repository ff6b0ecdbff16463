"""The rules on single rows that are switched on, and why each drops a row of training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.data import Row
from lingvo_gshard.wings.preparation.cleaning import markup
from lingvo_gshard.wings.preparation.cleaning.scripts import WrongScript

# Codes of corpora -> the detector's code of the same language.
_SAME = {"nb": "no", "fil": "tl", "in": "id", "iw": "he", "ji": "yi", "sh": "sr", "mo": "ro"}


class OtherLanguage:
    """Decides whether a detector is sure that a text is in another language than its row says.

    The detector is naive Bayes over byte n-grams (Lui and Baldwin 2012,
    https://aclanthology.org/P12-3005/). Texts of languages that it does not know are accepted.
    """

    def __init__(self, most: float, model: str = ""):
        """Reads the detector's model, which takes seconds.

        Args:
          most: largest probability of another language that is accepted.
          model: path of a model of py3langid; "" for the one that the package has.

        Raises:
          UserError: the package is not installed, or the model cannot be read.
        """
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError:
            raise UserError(
                f"input.cleaning.max_other_language = {most} identifies languages, which needs the "
                f"package py3langid: pip install py3langid, or set it to 1"
            ) from None
        try:
            self._detector = LanguageIdentifier.from_model_file(
                model or MODEL_FILE, norm_probs=True
            )
        except Exception as error:  # Whatever the package meets in a damaged file.
            raise UserError(
                f"input.cleaning.language_model: {model} is no model of py3langid: {error}"
            ) from None
        self._known = frozenset(self._detector.labels)
        self._most = most

    def __call__(self, language: str, text: str) -> bool:
        """Returns whether a text is in another language than the given one."""
        code = language.replace("-", "_").partition("_")[0].partition("@")[0].lower()
        code = _SAME.get(code, code)
        if code not in self._known:
            return False
        found, probability = self._detector.classify(text)
        return found != code and probability > self._most


EMPTY = "a side is empty"
IDENTICAL = "both sides are identical"
SHORT = "a side is too short"
LONG = "a side is too long"
RATIO = "the sides' lengths are too unlike"
DAMAGED = "a side has U+FFFD, which stands for characters that were lost"

_POLICIES = "'keep', 'drop', or for pairs 'equal', which drops those whose sides differ in them"

# Returns why a normalized row is dropped; "" if the rule keeps it.
Rule = Callable[[Row], str]
# Returns whether a text is wrong for a language.
_IsWrong = Callable[[str, str], bool]


def define(p: Params, policies: Sequence[str]) -> None:
    """Defines the hyperparameters of all rules. Markup and placeholders have `policies`."""
    p.define("drop_damaged", True, "Whether to drop rows with U+FFFD, a sign of lost characters.")
    p.define(
        "max_foreign_letters",
        0.9,
        "Largest share of a text's letters outside of the scripts of its language, by Unicode "
        "CLDR's table; 1: no limit.",
        minimum=0,
        maximum=1,
    )
    p.define(
        "scripts", (), "Scripts in place of the table's, such as ('mni=Mtei', 'kk=Cyrl+Latn')."
    )
    for kind, what in (
        (markup.MARKUP, "tags or character references"),
        (markup.PLACEHOLDERS, "placeholders such as {name}"),
    ):
        p.define(kind.name, markup.KEEP, f"Rows with {what}: {_POLICIES}.", choices=policies)
    p.define(
        "max_other_language",
        1.0,
        "Largest probability that a text is in another language than its row says; 1: languages "
        "are not identified. Needs the extra 'language-id'.",
        above=0,
        maximum=1,
    )
    p.define(
        "language_model", "", "Path of another model of py3langid; '': the one of the package."
    )


def of_pairs(p: Params) -> list[Rule]:
    """Returns the rules on sentence pairs that are switched on, cheap ones first.

    Raises:
      UserError: a setting is wrong, or needs a package that is not installed.
    """
    # Attributes of Params are looked up in a tree, which is slow for every row.
    rules: list[Rule] = [_lengths(p.min_characters, p.max_characters, p.max_length_ratio)]
    if p.drop_identical:
        rules.append(_identical)
    return rules + _of_texts(p, functools.partial(_wrong_side, p.target_language))


def of_documents(p: Params) -> list[Rule]:
    """Returns the rules on documents that are switched on; see `of_pairs`."""
    return _of_texts(p, functools.partial(_wrong_document, p.language))


def _of_texts(p: Params, drop: Callable[[_IsWrong, str, Row], str]) -> list[Rule]:
    """Returns the rules on texts. `drop` says which text of a row is wrong for its language."""
    rules: list[Rule] = [_damaged] if p.drop_damaged else []
    for kind in (markup.MARKUP, markup.PLACEHOLDERS):
        policy = markup.Policy(kind, p.get(kind.name))
        if policy.is_on:
            rules.append(lambda row, policy=policy: policy(row.source, row.target))
    wrong_script = WrongScript(p.max_foreign_letters, p.scripts)
    if p.max_foreign_letters < 1:
        rules.append(functools.partial(drop, wrong_script, "is not in a script of its language"))
    if p.max_other_language < 1:
        other = OtherLanguage(p.max_other_language, p.language_model)
        rules.append(functools.partial(drop, other, "is in another language"))
    return rules


def empty_side(row: Row) -> str:
    """Returns EMPTY if a side of a pair is empty, else ""."""
    return "" if row.source and row.target else EMPTY


def _lengths(least: int, most: int, ratio: float) -> Rule:
    def reason(row: Row) -> str:
        short, long = len(row.source), len(row.target)
        if short > long:
            short, long = long, short
        if not short:
            return EMPTY
        if short < least:
            return SHORT
        if long > most:
            return LONG
        return RATIO if long > ratio * short else ""

    return reason


def _identical(row: Row) -> str:
    return IDENTICAL if row.source.casefold() == row.target.casefold() else ""


def _damaged(row: Row) -> str:
    return DAMAGED if "\ufffd" in row.source or "\ufffd" in row.target else ""


def _wrong_side(target: str, is_wrong: _IsWrong, what: str, row: Row) -> str:
    """Returns why a pair is dropped. Sources have the language of the row, targets one."""
    if is_wrong(row.language, row.source):
        return f"the source {what}"
    return f"the target {what}" if is_wrong(target, row.target) else ""


def _wrong_document(language: str, is_wrong: _IsWrong, what: str, row: Row) -> str:
    """Returns why a document is dropped. All have one language, or each row has its own."""
    return f"the text {what}" if is_wrong(language or row.language, row.target) else ""
