"""Makes small directories of prepared data for tests."""

from __future__ import annotations

import functools
import io
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np
import sentencepiece

from lingvo_gshard.data.batching.packing import EOS_ID
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary
from lingvo_gshard.wings.preparation.prepared import manifest
from lingvo_gshard.wings.preparation.prepared.shard_writer import ShardWriter
from tests.preparation.prepared import records

WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]
# (language, source) -> rows in each split.
SIZES = {("de", "news"): (600, 9), ("de", "web"): (300, 0), ("fr", "web"): (150, 4)}


@functools.cache
def vocabulary() -> Vocabulary:
    """Returns a vocabulary with a piece for each of WORDS."""
    model = io.BytesIO()
    rng = np.random.default_rng(0)
    lines = (" ".join(rng.choice(WORDS, 8)) for _ in range(600))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=450,
        byte_fallback=True,
        hard_vocab_limit=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    return Vocabulary(model.getvalue())


def sentences(count: int, seed: int, longest: int = 12) -> Iterator[str]:
    """Yields sentences of 1 to `longest` words that differ."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        words = rng.choice(WORDS, rng.integers(1, longest + 1)).tolist()
        yield " ".join([WORDS[number % len(WORDS)], WORDS[number // len(WORDS)], *words])


def prepare(
    directory: pathlib.Path,
    sizes: Mapping[tuple[str, str], tuple[int, ...]] | None = None,
    shards: int = 2,
    content: str = manifest.PAIRS,
    longest: int = 12,
) -> manifest.Manifest:
    """Writes prepared data and returns its manifest.

    Args:
      directory: where.
      sizes: (language, source) -> number of rows of "train" and "dev", and of "test" if there is
        that split.
      shards: number of shards of each group.
      content: PAIRS or TEXT.
      longest: most words of a sentence.
    """
    directory.mkdir(exist_ok=True)
    sizes = sizes or SIZES
    names = ("train", "dev", "test")[: len(next(iter(sizes.values())))]
    pieces, splits, counts = vocabulary(), {name: [] for name in names}, {}
    for seed, ((language, source), numbers) in enumerate(sizes.items()):
        kept = counts.setdefault(language, manifest.LanguageCounts())
        for split, count in zip(splits, numbers, strict=True):
            rows = list(sentences(count, 2 * seed + names.index(split), longest))
            for number in range(shards if count else 0):
                place = {"number": number, "count": shards}
                with ShardWriter(directory, split, language, source, **place) as writer:
                    for row in rows[number::shards]:
                        ids = [*pieces.encode(row), EOS_ID]
                        # The target says the same, half as long.
                        half = [*pieces.encode(" ".join(row.split()[::2])), EOS_ID]
                        pair = content == manifest.PAIRS
                        records.write(writer, ids if pair else [], half if pair else ids)
                splits[split].append(writer.close())
            kept.kept = {**kept.kept, split: kept.kept.get(split, 0) + count}
            kept.read += count
    pieces.save(str(directory), "joint")
    made = manifest.Manifest(
        content=content,
        splits=splits,
        languages=counts,
        vocabularies=[
            manifest.VocabularyFile(
                side="joint" if content == manifest.PAIRS else "target",
                kind="sentencepiece",
                files=["joint.model"],
                size=pieces.size,
                sha256=manifest.sha256_of(directory / "joint.model"),
            )
        ],
    )
    manifest.write(made, directory)
    return made
