# tests: wings/preparation/cleaning/all_rules.py
"""Tests texts in another language, and what a user reads without the detector."""

import sys

import pytest

from lingvo_gshard.wings.preparation.cleaning.all_rules import OtherLanguage

_GERMAN = "Das Programm zeigt Informationen über das System an und erlaubt Änderungen."
_ENGLISH = "The program shows information about the system and allows changes to it."


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    expected = r"max_other_language = 0.9 .* pip install py3langid"
    with pytest.raises(ValueError, match=expected):
        OtherLanguage(0.9)


def test_texts_in_another_language_are_found():
    pytest.importorskip("py3langid")
    other = OtherLanguage(0.9)
    assert other("de", _ENGLISH) and other("en_US", _GERMAN)
    assert not other("de_AT", _GERMAN) and not other("en", _ENGLISH)
    # Unknown languages, and texts that the detector is not sure of.
    assert not other("tlh", _ENGLISH) and not other("", _ENGLISH) and not other("de", "OK")
    assert not other("nb", "Programmet viser informasjon om systemet og tillater endringer.")


def test_a_damaged_model_is_refused(tmp_path):
    pytest.importorskip("py3langid")
    (tmp_path / "model").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="language_model: .*model is no model of py3langid"):
        OtherLanguage(0.9, str(tmp_path / "model"))
