# tests: wings/preparation/vocabularies/published_vocabulary.py
"""Tests SentencePiece models as Llama 2, Mistral and Gemma are published with.

Byte fallback, with and without a space before a text, control symbols and symbols of a user.
"""

import functools
import io
import json
import os
import subprocess

import numpy as np
import pytest
import safetensors.numpy
import sentencepiece

import lingvo_gshard as gshard
from benchmarks.peer_python import find_python
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import PublishedVocabulary
from tests.data.vocabularies import tricky_texts
from tests.open_models import published

LINES = (
    "the file could not be opened",
    "close the window and open another one",
    "das Fenster wird nun wieder ganz geschlossen",
    "1234 files, 56 folders",
    "  indented text",
    "tabs\tand more",
)
BYTES = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
KINDS = {
    "llama": BYTES,
    "mistral": BYTES | {"control_symbols": ["[INST]", "[/INST]"]},
    "gemma": {
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "pad_piece": "<pad>",
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
        "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
        "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "\n", "\n\n"],
    },
}
SETTINGS = {
    "llama": {"tokenizer_class": "LlamaTokenizer", "legacy": False},
    "mistral": {"tokenizer_class": "LlamaTokenizer", "legacy": True},
    "gemma": {"tokenizer_class": "GemmaTokenizer"},
}
TEXTS = (
    "the file could not be opened",
    "two  spaces  inside  ",
    "",
    "line\nbreak\n\nand more",
    "emoji ☃ 😀 é",
    "12345 files",
    "tab\there",
)
# Transformers 5 reads the first of several spaces before a text as the one that models add.
SPACED = ("  two", " ")
SPECIAL = {
    "llama": ("a</s>b", "<s> x", "a</s> b</s>"),
    "mistral": ("[INST] the file [/INST] ok", "a</s>b", "[INST]the"),
    "gemma": ("<start_of_turn>user\nfile<end_of_turn>\n", "a<eos>b", "<bos> x"),
}
PEER = """
import json, sys, transformers
kind, directory, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tokenizer = getattr(transformers, kind).from_pretrained(directory)
print(json.dumps([tokenizer.encode(text) for text in texts]))
"""


@functools.cache
def trained(kind):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 3),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **KINDS[kind],
    )
    return model.getvalue()


def write(directory, kind, **settings):
    """Writes the files of a tokenizer, and returns the SentencePiece model."""
    directory.mkdir(exist_ok=True)
    model = sentencepiece.SentencePieceProcessor(model_proto=trained(kind))
    ids = {"bos": model.bos_id(), "eos": model.eos_id(), "unk": model.unk_id()}
    names = {f"{name}_token": model.id_to_piece(index) for name, index in ids.items()}
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        **names,
        **SETTINGS[kind],
        **settings,
    }
    (directory / "tokenizer.model").write_bytes(trained(kind))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps({"eos_token_id": model.eos_id()}))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_the_ids_of_the_model_alone(kind, tmp_path):
    model = write(tmp_path / kind, kind)
    vocabulary = PublishedVocabulary(tmp_path / kind)
    assert vocabulary.size == model.vocab_size()
    assert vocabulary.before == (model.bos_id(),) and vocabulary.eos_id == model.eos_id()
    # Special tokens stand for themselves, which the model alone does not know.
    for text in (text for text in tricky_texts.texts() if "<s>" not in text):
        assert vocabulary.encode(text) == model.encode(text), repr(text)
    for text in (*TEXTS, *SPACED):
        ids = vocabulary.encode(text)
        assert ids == model.encode(text)
        assert vocabulary.decode([model.bos_id(), *ids, model.eos_id()]) == text
        assert "".join(map(vocabulary.piece, ids)) == "".join(map(model.id_to_piece, ids))


@pytest.mark.parametrize(("value", "before"), [(True, (1,)), (False, ()), (None, ())])
def test_a_setting_says_whether_a_text_of_the_model_has_a_beginning(value, before, tmp_path):
    """As `tokenizer(text)` of transformers 5.24 does."""
    write(tmp_path / "model", "llama", add_bos_token=value)
    assert PublishedVocabulary(tmp_path / "model").before == before


@pytest.mark.parametrize("value", [True, False, None])
@pytest.mark.parametrize("has_beginning", [True, False])
def test_a_tokenizer_json_says_itself_whether_a_text_has_a_beginning(
    has_beginning, value, tmp_path
):
    """transformers 5.24 drops `add_bos_token` where there is a tokenizer.json."""
    published.write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    if not has_beginning:
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"post_processor": None}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    settings = {"bos_token": "<s>", "add_bos_token": value}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert PublishedVocabulary(tmp_path).before == ((1,) if has_beginning else ())


def pieces(vocabulary, text):
    return [vocabulary.piece(index) for index in vocabulary.encode(text)]


def test_special_tokens_stand_for_themselves(tmp_path):
    write(tmp_path / "new", "mistral", legacy=False)
    write(tmp_path / "old", "mistral", legacy=True)
    new, old = (PublishedVocabulary(tmp_path / name) for name in ("new", "old"))
    assert pieces(new, "x[INST]x x</s>") == ["▁", "x", "[INST]", "x", "▁", "x", "</s>"]
    assert pieces(old, "x[INST]x x</s>") == ["▁", "x", "[INST]", "▁", "x", "▁", "x", "</s>"]
    assert pieces(old, "[INST] x") == pieces(new, "[INST] x") == ["[INST]", "▁", "x"]


def test_tokens_that_were_added_follow_the_pieces(tmp_path):
    model = write(tmp_path / "model", "llama")
    size = model.vocab_size()
    (tmp_path / "model" / "added_tokens.json").write_text(json.dumps({"<|end|>": size + 1}))
    vocabulary = PublishedVocabulary(tmp_path / "model")
    assert vocabulary.size == size + 2
    ids = vocabulary.encode("the file<|end|>")
    assert ids == [*model.encode("the file"), size + 1]
    assert vocabulary.decode(ids) == "the file"
    assert (vocabulary.piece(size + 1), vocabulary.piece(size)) == ("<|end|>", "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(kind, tmp_path):
    python = find_python(os.environ.get("PEERS_PYTHON"), ("transformers", "sentencepiece"))
    if not python:
        pytest.skip("transformers is not installed, and PEERS_PYTHON names no Python with it")
    write(tmp_path / kind, kind)
    vocabulary = PublishedVocabulary(tmp_path / kind)
    texts = [*TEXTS, *SPECIAL[kind], *(SPACED if kind == "gemma" else ())]
    # Spaces before a text are told apart above.
    drawn = tricky_texts.texts()
    texts += [text for text in drawn if kind == "gemma" or not text.startswith((" ", "▁"))]
    command = [python, "-c", PEER, SETTINGS[kind]["tokenizer_class"], str(tmp_path / kind)]
    done = subprocess.run(
        [*command, json.dumps(texts)], check=True, capture_output=True, text=True, timeout=300
    )
    expected = json.loads(done.stdout.splitlines()[-1])
    for text, ids in zip(texts, expected, strict=True):
        # `begin` would not put a second <s> before a text that has one.
        assert [*vocabulary.before, *vocabulary.encode(text)] == ids, text


def test_a_model_is_imported_with_its_sentencepiece_model(tmp_path):
    size = sentencepiece.SentencePieceProcessor(model_proto=trained("llama")).vocab_size()
    source = tmp_path / "model"
    tensors = published.write(source, vocab_size=size)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.ones((size, published.MODEL), np.float32)
    safetensors.numpy.save_file(tensors, source / "model.safetensors")
    (source / "tokenizer.json").unlink()
    model = write(source, "llama")
    gshard.import_model(source, tmp_path / "run", length=16)
    run = gshard.load(tmp_path / "run")
    run.model  # noqa: B018  loads the tokenizer
    assert run.input.vocabulary.encode(TEXTS[0]) == model.encode(TEXTS[0])
    run.export(tmp_path / "out", "huggingface")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
