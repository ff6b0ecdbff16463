# tests: /README.md, /Makefile, /docs/serving.md, /docs/decoding.md, wings/serving/page/
"""Holds that a fresh quickstart translates rightly what the README, the docs and its page show.

The slow test translates with a run of `make quickstart`, and needs its directory:

    make quickstart LOGDIR=runs/quickstart
    export GSHARD_QUICKSTART=runs/quickstart
    .venv/bin/python -m pytest -m slow tests/examples/test_showcase.py
"""

import os
import pathlib
import re

import pytest

import lingvo_gshard as gshard

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN = "GSHARD_QUICKSTART"

_FILE_NOT_SAVED = r"(?=.*\bfile)(?=.*\bsav)(?=.*(fail|not|n't|unable|error))"
_ENTER_PASSWORD = r"(?=.*\bpassword)(?=.*\b(enter|type|input|insert|provide|specify))"
# A sentence that is shown -> a pattern of its right translations, in lower case.
RIGHT = {
    "No se pudo guardar el archivo.": _FILE_NOT_SAVED,
    "Non se puido gardar o ficheiro.": _FILE_NOT_SAVED,
    "No s'ha pogut desar el fitxer.": _FILE_NOT_SAVED,
    "Het bestand kon niet worden opgeslagen.": _FILE_NOT_SAVED,
    "Não foi possível salvar o arquivo.": _FILE_NOT_SAVED,
    "Filen kunde inte sparas.": _FILE_NOT_SAVED,
    "Vous devez saisir un mot de passe.": _ENTER_PASSWORD,
    "Introduza a sua palavra-passe.": _ENTER_PASSWORD,
    "Sie müssen ein Passwort eingeben.": _ENTER_PASSWORD,
    "Il file non esiste.": r"(?=.*\bfile)(?=.*(not exist|n't exist|not found|no such))",
    "O dispositivo não está ligado.": r"(?=.*\bdevice)(?=.*(not|n't))(?=.*(connect|\bon\b|link))",
    "El servidor no responde.": r"(?=.*\bserver)(?=.*(not|n't|no))(?=.*\brespon)",
    "Borrar de todas las clases": r"(?=.*\ball\b)(?=.*\bclasses)(?=.*(remove|delete|clear|erase))",
}


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _shown() -> dict[str, str]:
    """Returns the sentences that the quickstart's run is shown with -> where."""
    pages = ["README.md", "lingvo_gshard/tools/help/translate.txt"]
    pages += ["lingvo_gshard/tools/help/serve.txt", "docs/decoding.md", "docs/serving.md"]
    pages += ["docs/python_api.md", "docs/pictures/server_page.py"]
    patterns = (
        r'echo "([^"]+)" \| (?:gshard-translate --logdir=runs/quickstart|python run_\w+\.py)',
        r'run\.translate\(\["([^"]+)"',
        r'/v1/translate -d \'\{"text": "([^"]+)"',
        r'translator\(options\)\.translate\(\["([^"]+)"',
        r'^SENTENCE = "([^"]+)"',
    )
    found = {
        sentence: page
        for page in pages
        for pattern in patterns
        for sentence in re.findall(pattern, _text(page), re.MULTILINE)
    }
    lines = re.search(r'printf "(.+?)" > lines\.txt', _text("docs/decoding.md"))[1]
    found |= {line: "docs/decoding.md" for line in lines.split("\\n") if line}
    recipe = _text("Makefile").partition("\nquickstart:")[2].partition("\ninstall:")[0]
    found |= {line: "Makefile" for line in re.findall(r'^\t  "(.+)" \\$', recipe, re.MULTILINE)}
    page = _text("lingvo_gshard/wings/serving/page/examples.js")
    by_language = dict(re.findall(r'^  (\w\w): "(.+)",$', page, re.MULTILINE))
    learned = gshard.experiment("translation.quickstart").input.languages
    found |= {by_language[code]: "the server's page" for code in learned if code in by_language}
    return found | {source: page for source, _, page in _printed()}


def _printed() -> list[tuple[str, str, str]]:
    """Returns the translations that pages print: (sentence, translation, page)."""
    readme, serving = _text("README.md"), _text("docs/serving.md")
    pairs = re.findall(r"^ +source  (.+)\n.*\ntranslation  (.+)$", readme, re.MULTILINE)
    found = [(*pair, "README.md") for pair in pairs]
    pairs = re.findall(r'"source": "([^"]+)", "text": "([^"]+)"', serving)
    found += [(*pair, "docs/serving.md") for pair in pairs]
    # The tutorial trains a smaller model, on two of the languages.
    tutorial = _text("docs/first_translation.md")
    sentences = re.findall(r'"([^"]+)"', re.search(r"^sentences = (.+)$", tutorial, re.M)[1])
    translations = re.findall(r"\*([^*]+\.)\*", tutorial.partition("two sentences above")[2])
    pairs = zip(sentences, translations, strict=True)
    return found + [(*pair, "docs/first_translation.md") for pair in pairs]


def _is_right(sentence: str, translation: str) -> bool:
    return bool(re.match(RIGHT[sentence], translation.lower()))


def test_each_sentence_that_is_shown_has_a_right_translation():
    shown = _shown()
    assert {"README.md", "Makefile", "the server's page"} <= set(shown.values())
    assert set(shown) == set(RIGHT)


def test_printed_translations_are_right():
    assert len(_printed()) == 4
    for sentence, translation, page in _printed():
        assert _is_right(sentence, translation), f"{page}: {sentence} -> {translation}"


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("No se pudo guardar el archivo.", "The file was saved."),
        ("No se pudo guardar el archivo.", "Failed to turn on the file."),
        ("Il file non esiste.", "The file exists."),
        ("El servidor no responde.", "The server is not available."),
    ],
)
def test_wrong_translations_are_found(sentence, wrong):
    assert not _is_right(sentence, wrong)


@pytest.mark.slow
@pytest.mark.skipif(RUN not in os.environ, reason=f"{RUN} names no run of `make quickstart`")
def test_the_quickstart_translates_them_rightly():
    sentences = list(RIGHT)
    found = dict(zip(sentences, gshard.load(os.environ[RUN]).translate(sentences), strict=True))
    wrong = {each: text for each, text in found.items() if not _is_right(each, text)}
    assert not wrong
