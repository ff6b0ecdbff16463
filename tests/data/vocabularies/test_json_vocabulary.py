"""Tests a tokenizer.json as a vocabulary, against the tokenizers package itself."""

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st

from lingvo_gshard.data.vocabularies import files
from lingvo_gshard.data.vocabularies.json_vocabulary import JsonVocabulary
from tests.data import corpora


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


def test_errors():
    with pytest.raises(ValueError, match="no tokenizer.json"):
        JsonVocabulary(b"{}")
    with pytest.raises(ValueError, match="No token ends a text; one of </s>"):
        JsonVocabulary(tokenizer(["<unk>"]).to_str().encode())
