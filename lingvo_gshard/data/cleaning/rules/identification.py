"""OtherLanguage: finds texts in another language than their row says, by py3langid."""

from __future__ import annotations

from lingvo_gshard.core.errors import UserError

EXTRA = "language_id"
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
                f"package py3langid: pip install 'lingvo_gshard[{EXTRA}]', or set it to 1"
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
