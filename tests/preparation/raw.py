"""Raw text for tests of preparation, and what is compared of prepared data."""

import hashlib
import pathlib

import numpy as np
from array_record.python import array_record_module

from lingvo_gshard.data.vocabularies.files import load_pair
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from lingvo_gshard.wings.preparation.preparation import Preparation
from lingvo_gshard.wings.preparation.prepared import manifest

_WORDS = {
    "en": "the dog cat house sees eats builds red big green garden water bread tree".split(),
    "de": "der Hund Katze Haus sieht isst baut rot groß grün Garten Wasser Brot Baum".split(),
    "fr": "le chien chat maison voit mange construit rouge grand vert jardin eau pain bois".split(),
}


def rows(count, languages=("de", "fr"), seed=0):
    """Returns (language, source, target) of sentences of 3 to 9 words, no two alike."""
    draw = np.random.default_rng(seed)
    result = {}
    while len(result) < count:
        language = languages[len(result) % len(languages)]
        words = draw.integers(14, size=draw.integers(3, 10)).tolist()
        pair = (" ".join(_WORDS[side][word] for word in words) for side in (language, "en"))
        result[(language, *pair)] = None
    return list(result)


def write_tsv(path, lines):
    """Writes rows as a TSV file and returns its path."""
    path.write_text("".join("\t".join(row) + "\n" for row in lines), encoding="utf-8")
    return str(path)


def params(cache, **values):
    """Returns Params for a tiny vocabulary."""
    made = Preparation.params().set(**values)
    made.vocabulary.set(size=330, cache_directory=str(cache))
    return made


def run(tmp_path, sources, workers=1, on_bad_row="refuse", output="out", **values):
    """Prepares sources with a tiny vocabulary; returns the directory and the manifest."""
    options = PrepareOptions(params(tmp_path / "cache", **values), workers, on_bad_row)
    directory = tmp_path / output
    return directory, prepare(directory, sources, options)


def texts(directory):
    """Returns the sorted (split, language, source, target) of all rows of prepared data."""
    sides = load_pair(directory)
    found = []
    content = manifest.read(directory)
    for split, shards in content.splits.items():
        for shard in shards:
            reader = array_record_module.ArrayRecordReader(str(directory / shard.file))
            pair = manifest.decode(reader.read_all(), content.id_bytes)
            for number in range(shard.rows):
                decoded = (
                    side.decode(tokens.gather(np.array([number])).tolist())
                    for side, tokens in zip(sides, pair, strict=True)
                )
                found.append((split, shard.language, *decoded))
    return sorted(found)


def digests(directory):
    """Returns the SHA-256 of every file by its path in the directory."""
    root = pathlib.Path(directory)
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
