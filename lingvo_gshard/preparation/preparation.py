"""Preparation: the settings that determine prepared data."""

from __future__ import annotations

from typing import Any

import msgspec

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.data.cleaning.cleaner import Cleaner
from lingvo_gshard.data.cleaning.documents import DocumentCleaner
from lingvo_gshard.data.prepared.manifest import sha256_of
from lingvo_gshard.data.vocabularies import files
from lingvo_gshard.data.vocabulary_trainer import VocabularyTrainer
from lingvo_gshard.preparation.inputs.source import Source

# These change where and how fast something is done, and not what comes out.
_WITHOUT_EFFECT = ("vocabulary.cache_directory",)


class Preparation(Configurable):
    """The settings that determine prepared data, besides the sources."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("cleaning", Cleaner.params(), "Params of the cleaner of sentence pairs.")
        p.define("documents", DocumentCleaner.params(), "Params of the cleaner of text.")
        p.define("vocabulary", VocabularyTrainer.params(), "Params of the vocabularies.")
        p.define(
            "temperature",
            1.0,
            "The vocabulary is trained on languages in proportion to n ** (1 / temperature).",
            minimum=1,
        )
        p.define(
            "held_out_per_mille",
            10,
            "Thousandths of the target sentences that are held out for dev and as many for test, "
            "of sources without a split of their own.",
            minimum=0,
            below=500,
        )
        p.define("seed", 0, "Chooses the order of rows.", minimum=0)
        p.define("shard_rows", 1_000_000, "Largest number of rows of a shard.", minimum=1)
        p.define("max_line_bytes", 1 << 20, "Longer lines are bad rows.", minimum=1)
        p.define(
            "bucket_bytes",
            64 << 20,
            "Bytes of the rows that a worker holds at a time, in memory about five times as many.",
            minimum=1,
        )
        return p


def to_settings(params: Params, sources: tuple[Source, ...]) -> dict[str, Any]:
    """Returns all settings by name, as values of JSON."""
    settings: dict[str, Any] = {}
    for name, value in params.leaves():
        if name not in _WITHOUT_EFFECT:
            if isinstance(value, type):
                value = f"{value.__module__}.{value.__qualname__}"
            settings[name] = value
    for path in files.paths_of(params.vocabulary.files):
        settings[f"file {path}"] = sha256_of(path)
    for number, source in enumerate(sources):
        for field, value in vars(source).items():
            settings[f"sources[{number}].{field}"] = value
    return msgspec.json.decode(msgspec.json.encode(settings))
