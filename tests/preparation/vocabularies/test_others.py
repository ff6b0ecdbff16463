"""Tests vocabularies of others: used as they are, by translation inputs, too."""

import io

import pytest
import sentencepiece

from lingvo_gshard.data.sources import tsv
from lingvo_gshard.data.translation_input import TranslationInput
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary
from lingvo_gshard.wings.preparation.vocabularies import others
from tests.data import corpora
from tests.preparation.vocabularies.test_json_vocabulary import tokenizer


def sentencepiece_model(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(row.target for row in corpora.rows(200)),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def test_a_sentencepiece_model_keeps_its_ids(tmp_path):
    # Those of SentencePiece by default: unk 0, bos 1, eos 2, no padding.
    (tmp_path / "their.model").write_bytes(sentencepiece_model())
    (found,) = others.of_others(str(tmp_path / "their.model"))
    assert (found.unk_id, found.bos_id, found.eos_id, found.pad_id) == (0, 1, 2, 2)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "their.model"))
    ids = found.encode("the dog sees")
    assert ids == processor.encode("the dog sees")
    assert found.decode([1, *ids, 2, *ids]) == "the dog sees"
    with pytest.raises(ValueError, match="no id that ends a text"):
        Vocabulary(sentencepiece_model(eos_id=-1))


@pytest.mark.parametrize("kind", ["json", "model"])
def test_a_translation_input_takes_a_vocabulary_of_others(tmp_path, kind):
    corpora.write(tmp_path / "train.tsv", 100)
    path = tmp_path / f"their.{kind}"
    path.write_bytes(
        tokenizer().to_str().encode() if kind == "json" else sentencepiece_model(byte_fallback=True)
    )
    p = TranslationInput.params()
    p.corpus = tsv.TsvReader.params().set(train=str(tmp_path / "train.tsv"))
    p.vocabulary.files = str(path)
    p.set(batch_rows=4, source_length=150, target_length=100, packing_window=100)
    data = p.instantiate()
    (found,) = others.of_others(str(path))
    sizes = {"source": found.size, "target": found.size}
    assert data.vocabulary_sizes() == data.configured_vocabulary_sizes(p) == sizes
    batch = next(data.train_batches(seed=1))
    first = batch["target_labels"][0][batch["target_segments"][0] == 1]
    assert first[-1] == found.eos_id and batch["target_inputs"][0][0] == found.bos_id
    assert found.decode(first) in {row.target for row in data.rows("train")}
    assert data.text_ids.ends == found.end_ids and data.text_ids.before == (found.bos_id,)
    data.save_vocabularies(str(tmp_path / "saved"))
    other = p.instantiate()
    other.load_vocabularies(str(tmp_path / "saved"))
    assert other.source_vocabulary == found and other.source_vocabulary is other.target_vocabulary


def test_wrong_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="input.vocabulary.files: nowhere.json: No such file"):
        others.of_others(["nowhere.json"])
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.json: This is no tokenizer.json"):
        others.of_others(str(tmp_path / "a.json"))
    (tmp_path / "their.model").write_bytes(sentencepiece_model())
    with pytest.raises(ValueError, match="is a SentencePiece model, which has an end and a begin"):
        others.of_others(str(tmp_path / "their.model"), "<eos>")
    with pytest.raises(ValueError, match="names 2 files; one was expected"):
        corpora.trainer(tmp_path, files=("a", "b"))
