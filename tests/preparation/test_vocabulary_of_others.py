# tests: wings/preparation/train_vocabulary.py, wings/preparation/vocabularies/json_vocabulary.py
"""Tests data that is prepared with a tokenizer.json of others, and read for training."""

from lingvo_gshard.data.input import TextIds
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from lingvo_gshard.wings.preparation.prepared.translation_input import PreparedTranslationInput
from lingvo_gshard.wings.preparation.vocabularies.json_vocabulary import JsonVocabulary
from tests.preparation import raw
from tests.preparation.vocabularies.test_json_vocabulary import tokenizer


def test_rows_have_the_ids_of_the_tokenizer(tmp_path):
    # The end is id 0, and begins texts, too.
    made = tokenizer(["<|endoftext|>"])
    (tmp_path / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    rows = raw.rows(40)
    path = raw.write_tsv(tmp_path / "pairs.tsv", rows)
    params = raw.params(tmp_path / "cache", held_out_per_mille=0)
    params.vocabulary.files = (str(tmp_path / "tokenizer.json"),)
    prepared = prepare(tmp_path / "out", [path], PrepareOptions(params, workers=1))
    (described,) = prepared.vocabularies
    assert (described.kind, described.files) == ("tokenizers", ["joint.json"])
    assert raw.texts(tmp_path / "out") == sorted(("train", *row) for row in rows)
    data = PreparedTranslationInput.params().set(directory=str(tmp_path / "out")).instantiate()
    assert data.target_vocabulary == JsonVocabulary(made.to_str().encode())
    assert data.text_ids == TextIds(before=(0,), ends=(0,), pad=0)
