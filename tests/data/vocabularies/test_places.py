# tests: wings/preparation/vocabularies/published_vocabulary.py, data/vocabularies/vocabulary.py
"""Tests where the tokens of a text are, against the text of each piece."""

import io

import pytest
import sentencepiece

from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import (
    PiecesTokenizer,
    SentencePieceTokenizer,
)

TEXTS = ("", "a", "hello  world \U0001d518 \u00fc", "\U0001f642\U0001f642 you", " \ufb01 how")


@pytest.fixture(scope="module")
def model():
    """Returns a SentencePiece model with bytes for unknown characters."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world how are you", "the world \u00fc"] * 50),
        model_writer=written,
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    return written.getvalue()


def check(encode, places, piece, text):
    """Compares each piece with the characters at its place."""
    ids, found = encode(text), places(text)
    assert len(ids) == len(found)
    assert all(b[0] >= a[0] for a, b in zip(found, found[1:], strict=False))
    for index, (begin, end) in zip(ids, found, strict=True):
        assert begin < end
        if (shown := piece(index).replace("\u2581", "")) and not shown.startswith("<0x"):
            assert text[begin:end].strip() == shown


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_where_their_characters_are(model, text, tmp_path):
    text = text.replace("\U0001d518", "")
    vocabulary = Vocabulary(model)
    check(vocabulary.encode, vocabulary.places, vocabulary.piece, text)
    path = tmp_path / "m.model"
    path.write_bytes(model)
    added = {"<|end|>": 400}
    tokenizer = SentencePieceTokenizer(path, True, added, begins_anew=False)
    check(tokenizer.encode, tokenizer.places, tokenizer.piece, f"{text}<|end|>{text}<s> hello")
    ids = {vocabulary.piece(index): index for index in range(vocabulary.size)} | {">>de<<": 500}
    tokenizer = PiecesTokenizer(path, ids, {})
    check(tokenizer.encode, tokenizer.places, tokenizer.piece, f">>de<< hello {text}")
