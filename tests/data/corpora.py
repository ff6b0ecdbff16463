"""Small synthetic corpora and vocabularies for tests."""

import itertools

from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation.vocabularies.vocabulary_trainer import VocabularyTrainer

SIZE = 300

_WORDS = {
    "en": "the dog cat house sees eats builds red big green garden water bread".split(),
    "de": "der Hund Katze Haus sieht isst baut rot groß grün Garten Wasser Brot".split(),
    "fr": "le chien chat maison voit mange construit rouge grand vert jardin eau pain".split(),
}


def rows(count, languages=("de", "fr")):
    """Returns `count` rows of sentences of 2 to 9 words, translated word by word."""
    result = []
    for number, language in zip(range(count), itertools.cycle(languages)):  # noqa: B905
        words = [(number * 7 + number // 13 * step + step * step) % 13 for step in range(1, 9)]
        words = words[: 1 + number % 8] + [number % 13]
        source, target = (" ".join(_WORDS[side][w] for w in words) for side in (language, "en"))
        result.append(Row(language, source, target))
    return result


def write(path, count, **kwargs):
    """Writes rows as a TSV file and returns its path."""
    lines = ("\t".join(row[:3]) + "\n" for row in rows(count, **kwargs))
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def trainer(cache, **values):
    """Returns a trainer of tiny vocabularies."""
    params = VocabularyTrainer.params().set(size=SIZE, cache_directory=str(cache))
    return params.set(**values).instantiate()
