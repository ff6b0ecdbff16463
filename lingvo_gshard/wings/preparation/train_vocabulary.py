"""Trains the vocabularies on rows that are drawn by temperature."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from lingvo_gshard.core import Progress, UserError
from lingvo_gshard.data import Row, Vocabulary, rows_by_language, save_pair
from lingvo_gshard.wings.preparation.job import Job, Task
from lingvo_gshard.wings.preparation.mixing import temperature_probabilities
from lingvo_gshard.wings.preparation.prepared import manifest as record_format
from lingvo_gshard.wings.preparation.prepared.manifest import VocabularyFile, sha256_of
from lingvo_gshard.wings.preparation.row_files import Groups, read_group
from lingvo_gshard.wings.preparation.vocabularies import vocabulary_trainer
from lingvo_gshard.wings.preparation.vocabularies.json_vocabulary import JsonVocabulary
from lingvo_gshard.wings.preparation.vocabularies.vocabulary_trainer import (
    Coverage,
    VocabularyTrainer,
)

STAGE = "4-vocabulary"
# Characters drawn for each that the trainer uses, since it leaves out repeated sentences.
_SPARE = 4


class VocabularyRecord(msgspec.Struct):
    """The vocabularies, the bytes of an id in a record, and lines for users."""

    files: list[VocabularyFile]
    id_bytes: int
    notes: list[str]


def train_vocabulary(task: Task, job: Job, progress: Progress, buckets: Groups) -> VocabularyRecord:
    """Trains the vocabularies, writes them to the output and returns the record.

    Raises:
      UserError: a size is too small, or there is no text.
    """
    del task, progress
    p = job.params
    trainer = p.vocabulary.instantiate()
    trainer.unicode_form = job.cleaner.p.unicode_form
    rows = list(_draw(job, buckets, _SPARE * p.vocabulary.max_characters, p.temperature))
    try:
        source, target = _train(trainer, rows, p.temperature, job.is_text)
    except ValueError as error:
        raise UserError(str(error).replace("input.vocabulary.", "vocabulary.")) from None
    save_pair(job.local_output, source, target)
    sides = {"joint": source} if source is target else {"source": source, "target": target}
    covered = vocabulary_trainer.of_rows([] if job.sources[0].has_ids else rows, source, target)
    return VocabularyRecord(
        [_described(job, side, one, covered[side]) for side, one in sides.items()],
        record_format.id_bytes(max(source.size, target.size)),
        [note.replace("input.vocabulary.", "vocabulary.") for note in trainer.notes],
    )


def _draw(job: Job, buckets: Groups, most: int, temperature: float) -> Iterator[Row]:
    """Yields the first rows, in the order of digests, until each language has its share."""
    characters: dict[str, int] = defaultdict(int)
    for group in (group for groups in buckets for group in groups):
        characters[group.language] += group.characters
    languages = sorted(characters)
    counts = [characters[language] for language in languages]
    shares = temperature_probabilities(counts, temperature)
    is_all = sum(counts) <= most
    left = {
        language: characters[language] if is_all else float(share * most)
        for language, share in zip(languages, shares, strict=True)
    }
    for bucket, groups in enumerate(buckets):
        for group in groups:
            if left[group.language] <= 0:
                continue
            for row in read_group(job, bucket, group):
                left[group.language] -= len(row.source) + len(row.target)
                yield group.to_row(row)
                if left[group.language] <= 0:
                    break


def _train(
    trainer: VocabularyTrainer, rows: Sequence[Row], temperature: float, is_text: bool
) -> tuple[Vocabulary, Vocabulary]:
    """Returns the vocabularies of source and target; one twice for text, or if they are joint."""
    if not is_text:
        return trainer.train(rows, temperature)
    by_language = sorted(rows_by_language(rows).items())
    sentences = {language: vocabulary_trainer.lines_of(found) for language, found in by_language}
    joint = trainer.train_on(sentences, temperature)
    return joint, joint


def _described(
    job: Job, side: str, vocabulary: Vocabulary, covered: dict[str, Coverage]
) -> VocabularyFile:
    file = f"{side}{vocabulary.suffix}"
    job.deliver(file)
    return VocabularyFile(
        side=side,
        kind="tokenizers" if isinstance(vocabulary, JsonVocabulary) else "sentencepiece",
        files=[file],
        size=vocabulary.size,
        sha256=sha256_of(f"{job.local_output}/{file}"),
        coverage=covered,
    )
