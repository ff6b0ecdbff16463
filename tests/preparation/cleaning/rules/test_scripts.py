"""Tests scripts of languages, letter by letter and by examples."""

import unicodedata

import hypothesis
import pytest
import regex
from hypothesis import strategies as st

from lingvo_gshard.wings.preparation.cleaning import scripts
from lingvo_gshard.wings.preparation.cleaning.scripts import WrongScript, languages, scripts_of


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ("de", {"Latn", "Runr"}),
        ("pt_BR", {"Latn"}),
        ("ca@valencia", {"Latn"}),
        ("ru", {"Cyrl"}),
        ("sr", {"Cyrl", "Latn"}),
        ("sr@latin", {"Latn"}),
        ("sr_Latn", {"Latn"}),
        ("zh-Hant-TW", {"Hani"}),
        ("ja", {"Hani", "Hira", "Kana"}),
        ("ko", {"Hang", "Hani"}),
        ("deu_Latn", {"Latn"}),
        ("rus", {"Cyrl"}),
        ("tlh", set()),
        ("", set()),
    ],
)
def test_scripts_of_codes(language, expected):
    assert set(scripts_of(language)) == expected


def test_the_table_names_scripts_of_unicode_and_each_language_once():
    for script in {script for key in languages() for script in key.split()}:
        regex.compile(rf"\p{{sc={script}}}")
    codes = [code for codes in languages().values() for code in codes.split()]
    assert len(codes) == len(set(codes)) > 1000


@pytest.mark.parametrize(
    ("language", "text", "is_wrong"),
    [
        ("de", "Öffne die Datei", False),
        ("de", "Откройте файл", True),
        ("ru", "Откройте файл", False),
        ("ru", "Open the file", True),
        ("ru", "OpenGL: включить", False),
        ("zh_Hans", "打开 GL 文件", False),
        ("ja", "ファイルを開く ー", False),
        ("ja", "파일 열기", True),
        ("el", "12.5 %", False),
        ("tlh", "Откройте", False),
        ("got", "𐌰𐌱𐌲", False),
        ("de", "𐌰𐌱𐌲", True),
    ],
)
def test_texts(language, text, is_wrong):
    assert WrongScript(0.5)(language, text) == is_wrong


_SCRIPTS = {"de": "LATIN RUNIC", "ru": "CYRILLIC", "el": "GREEK", "th": "THAI"}
# Letters whose names begin with their script, unlike those that several scripts share.
_LETTERS = "aZäßжЯωΩกขאب漢한ᚠ 12.!"


@hypothesis.given(st.sampled_from(sorted(_SCRIPTS)), st.text(_LETTERS), st.floats(0, 1))
def test_the_share_is_that_of_letters_by_their_names(language, text, most):
    letters = [character for character in text if character.isalpha()]
    own = _SCRIPTS[language].split()
    outside = [c for c in letters if unicodedata.name(c).split()[0] not in own]
    assert WrongScript(most)(language, text) == (len(outside) > most * len(letters))


def test_given_scripts_replace_those_of_the_table():
    assert WrongScript(0.5)("ru", "Otkroyte")
    assert not WrongScript(0.5, ("ru=Latn+Cyrl",))("ru", "Otkroyte")
    assert WrongScript(0.5, "de=Cyrl")("de", "Datei")
    with pytest.raises(ValueError, match="input.cleaning.scripts has 'ru'; 'language=Script'"):
        WrongScript(0.5, ("ru",))
    with pytest.raises(ValueError, match="'Latin' is no script.*Did you mean 'Latn'"):
        WrongScript(0.5, ("ru=Latin",))


def test_all_letters_of_a_language_are_its_own():
    foreign = scripts._ForeignLetters(("Cyrl",))
    cyrillic = "".join(regex.findall(r"\p{sc=Cyrl}", scripts._all_letters()))
    assert foreign.count(cyrillic) == 0 and len(cyrillic) > 300
    others = regex.findall(r"[^\p{sc=Cyrl}\p{sc=Zyyy}\p{sc=Zinh}]", scripts._all_letters())
    assert foreign.count("".join(others)) == len(others)
