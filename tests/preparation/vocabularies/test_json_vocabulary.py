# tests: wings/preparation/vocabularies/json_vocabulary.py
# tests: wings/preparation/vocabularies/json_tokenizer.py
# tests: wings/preparation/vocabularies/tokenizer_vocabulary.py
"""Tests a tokenizer.json as a vocabulary, against the tokenizers package itself."""

import io
import json

import hypothesis
import pytest
import sentencepiece
import tokenizers
from hypothesis import strategies as st

from lingvo_gshard.data.vocabularies import files
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary
from lingvo_gshard.wings.preparation.vocabularies import others
from lingvo_gshard.wings.preparation.vocabularies.json_vocabulary import JsonVocabulary
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import PublishedVocabulary
from tests.data import corpora
from tests.open_models import published


def tokenizer(special=("<unk>", "<s>", "</s>", "<pad>")):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator((row.target for row in corpora.rows(200)), trainer)
    return made


@pytest.fixture(scope="module")
def found():
    return JsonVocabulary(tokenizer().to_str().encode())


def test_special_ids(found):
    assert (found.unk_id, found.bos_id, found.eos_id, found.pad_id) == (0, 1, 2, 3)
    assert found.end_ids == (2,) and found.before == found.target_start == (1,)
    only_end = JsonVocabulary(tokenizer(["<|endoftext|>"]).to_str().encode())
    assert (only_end.bos_id, only_end.eos_id, only_end.pad_id) == (0, 0, 0)
    ids = only_end.encode("the dog")
    assert only_end.decode([0, *ids, 0, *ids]) == "the dog"


@hypothesis.given(st.text(max_size=20), st.sampled_from(["", "</s>", "<pad> x", "a<s>"]))
def test_any_text_has_the_ids_of_the_package_and_none_that_is_special(found, text, special):
    text += special
    plain = tokenizer_without_special()
    assert found.encode(text) == plain.encode(text).ids
    assert found.encode_batch([text, "a"]) == found.encode_batch([text, "a"], num_threads=1)
    assert found.decode(found.encode(text)) == text
    assert not {found.bos_id, found.eos_id, found.pad_id} & set(found.encode(text))


def tokenizer_without_special(made=[]):  # noqa: B006
    """Returns the tokenizer as it was trained, with its special tokens as ordinary text."""
    if not made:
        made.append(tokenizer())
        made[0].encode_special_tokens = True
    return made[0]


def test_saved_pairs_are_loaded(found, tmp_path):
    files.save_pair(str(tmp_path / "joint"), found, found)
    source, target = files.load_pair(str(tmp_path / "joint"))
    assert source is target and source == found and source.size == found.size
    trained = corpora.trainer(tmp_path).train(corpora.rows(200), 1.0)[0]
    files.save_pair(str(tmp_path / "apart"), found, trained)
    assert files.load_pair(str(tmp_path / "apart")) == (found, trained)


def with_pieces(special, *pieces):
    """Returns a tokenizer.json whose vocabulary has more pieces, none of them added."""
    content = json.loads(tokenizer(special).to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {piece: len(vocabulary) + place for place, piece in enumerate(pieces)}
    return json.dumps(content).encode()


def test_a_piece_with_the_name_of_an_end_is_none():
    """As in Gemma 3, where "</s>" is a piece of texts, and in Qwen3."""
    found = JsonVocabulary(with_pieces(["<pad>", "<eos>", "<bos>"], "</s>", "<s>"))
    assert (found.eos_id, found.bos_id, found.pad_id) == (1, 2, 0)
    ids = found.encode("a </s> b<s>")
    assert found.decode(ids) == found.text_of(ids) == "a </s> b<s>"


def test_an_added_token_that_is_not_special_ends_no_text():
    made = tokenizer(["<|endoftext|>"])
    made.add_tokens(["</s>"])
    assert JsonVocabulary(made.to_str().encode()).eos_id == 0


def test_names_of_deepseek_are_known():
    names = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    found = JsonVocabulary(tokenizer(names).to_str().encode())
    assert (found.bos_id, found.eos_id, found.pad_id) == (0, 1, 2)


def test_settings_name_other_tokens(tmp_path):
    content = tokenizer(["<META>", "<EOT>", "</s>"]).to_str()
    (tmp_path / "their.json").write_text(content, encoding="utf-8")
    trainer = corpora.trainer(tmp_path, files=str(tmp_path / "their.json"), end_token="<EOT>")
    found = trainer.train(corpora.rows(10), 1.0)[0]
    assert (found.eos_id, found.bos_id, found.end_ids) == (1, 1, (1,))
    files.save_pair(str(tmp_path / "saved"), found, found)
    loaded, _ = files.load_pair(str(tmp_path / "saved"))
    assert loaded == found and (loaded.eos_id, loaded.bos_id) == (1, 1)
    assert loaded.encode("the dog") == found.encode("the dog")
    (both,) = others.of_others(str(tmp_path / "their.json"), "<EOT>", "<META>")
    assert (both.eos_id, both.bos_id) == (1, 0) and both != found


def test_wrong_tokens_are_refused(tmp_path):
    made = tokenizer(["<META>", "<EOT>"])
    with pytest.raises(ValueError, match="end_token names another one of <META>, <EOT>$"):
        JsonVocabulary(made.to_str().encode())
    with pytest.raises(ValueError, match="end_token is '<eot>', which is no special token; one of"):
        JsonVocabulary(made.to_str().encode(), "<eot>")
    with pytest.raises(ValueError, match="begin_token is 'a', which is no special token; one of"):
        JsonVocabulary(made.to_str().encode(), "<EOT>", "a")
    with pytest.raises(ValueError, match="input.vocabulary.end_token is '<EOT>', but"):
        corpora.trainer(tmp_path, end_token="<EOT>")


def test_half_of_a_character_is_refused(found, tmp_path):
    """`json.loads` of the text "\\ud800" makes one."""
    published.write(tmp_path / "model")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the dog"] * 20), model_writer=model, vocab_size=11, minloglevel=2
    )
    for vocabulary in (
        found,
        Vocabulary(model.getvalue()),
        PublishedVocabulary(tmp_path / "model"),
    ):
        for threads in (1, 2):
            with pytest.raises(
                ValueError, match=r"character 3 of the text is the lone surrogate U\+D8"
            ):
                vocabulary.encode_batch(["a", "b \ud800"], num_threads=threads)
        with pytest.raises(
            ValueError, match="lone surrogate U\\+DFFF, which is half of a character"
        ):
            vocabulary.encode("\udfff")


def test_errors():
    with pytest.raises(ValueError, match="no tokenizer.json"):
        JsonVocabulary(b"{}")
    with pytest.raises(ValueError, match="No token ends a text; one of </s>"):
        JsonVocabulary(tokenizer(["<unk>"]).to_str().encode())
