# tests: wings/preparation/published_inputs.py
"""Tests that the tokenizers of published models give the ids that they were published with.

The expected ids follow from what the files hold, by the rules of transformers' tokenizers.
"""

import json

import pytest
import sentencepiece

from lingvo_gshard.wings.preparation.published_inputs import PublishedSide
from tests.open_models.translation import models

TEXT = "the file could not"
CONFIG = {"eos_token_id": 2, "decoder_start_token_id": 2, "pad_token_id": 1}
NO_LANGUAGES = {"source": "", "target": ""}


def pieces_of(kind):
    return sentencepiece.SentencePieceProcessor(model_proto=models.trained(kind))


def write(directory, config, **files):
    directory.mkdir()
    for name, content in {"config.json": config, **files}.items():
        if isinstance(content, bytes):
            (directory / name).write_bytes(content)
        else:
            (directory / name).write_text(json.dumps(content))


def side(directory, name="source", **languages):
    return PublishedSide(directory, name, NO_LANGUAGES | languages)


def write_m2m(directory, **settings):
    """Writes an M2M-100's tokenizer and returns the ids of its pieces."""
    model = pieces_of("fairseq")
    names = [model.id_to_piece(index) for index in range(3, model.vocab_size())]
    ids = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    # Not in the order of the model.
    ids |= {piece: 4 + place for place, piece in enumerate(reversed(names))}
    files = {"sentencepiece.bpe.model": models.trained("fairseq"), "vocab.json": ids}
    write(directory, CONFIG, **files, **{"tokenizer_config.json": settings})
    return ids


def test_m2m_100_has_the_ids_of_a_table_and_then_the_languages(tmp_path):
    ids = write_m2m(tmp_path / "model", src_lang="de", tgt_lang="en")
    source, target = side(tmp_path / "model"), side(tmp_path / "model", "target")
    expected = [ids[piece] for piece in pieces_of("fairseq").encode(TEXT, out_type=str)]
    assert source.encode(TEXT) == expected
    assert source.encode("☃")[-1] == 3
    # de and en are the 17th and the 19th of 100 languages.
    first = len(ids)
    assert source.source_start == (first + 16,) and source.piece(first + 16) == "__de__"
    assert target.target_start == (2, first + 18) and target.size == first + 100
    assert target.decode([2, first + 18, *expected, 2]) == TEXT
    assert side(tmp_path / "model", source="zu").source_start == (first + 99,)


def test_nllb_numbers_pieces_from_one_higher(tmp_path):
    special = {"additional_special_tokens": ["ace_Arab", "deu_Latn", "<mask>"]}
    files = {"sentencepiece.bpe.model": models.trained("fairseq")}
    write(tmp_path / "model", CONFIG, **files, **{"special_tokens_map.json": special})
    model = pieces_of("fairseq")
    found = side(tmp_path / "model", source="deu_Latn")
    assert found.encode(TEXT) == [index + 1 for index in model.encode(TEXT)]
    assert found.encode("☃")[-1] == 3
    assert found.source_start == (model.vocab_size() + 2,)
    assert found.decode([index + 1 for index in model.encode(TEXT)]) == TEXT


def test_mbart_50_names_languages_with_their_country(tmp_path):
    special = {"additional_special_tokens": ["ar_AR", "de_DE", "en_XX", "<mask>"]}
    files = {"sentencepiece.bpe.model": models.trained("fairseq")}
    settings = {"src_lang": "de_DE", "tgt_lang": "en_XX"}
    files |= {"special_tokens_map.json": special, "tokenizer_config.json": settings}
    write(tmp_path / "model", CONFIG, **files)
    first = pieces_of("fairseq").vocab_size() + 1
    assert side(tmp_path / "model").source_start == (first + 1,)
    assert side(tmp_path / "model", "target").target_start == (2, first + 2)
    assert side(tmp_path / "model", source="ar_AR").source_start == (first,)


def write_marian(directory, config=(), more=(), **settings):
    """Writes a Marian's tokenizers and returns the ids of their pieces."""
    model = pieces_of("marian")
    pieces = [model.id_to_piece(index) for index in range(model.vocab_size())]
    ids = {"</s>": 0, "<unk>": 1}
    for piece in (*sorted(pieces), *more, "<pad>"):
        ids.setdefault(piece, len(ids))
    one = {"eos_token_id": 0, "pad_token_id": len(ids) - 1} | dict(config)
    one.setdefault("decoder_start_token_id", len(ids) - 1)
    files = {"source.spm": models.trained("marian"), "target.spm": models.trained("marian")}
    files |= {"vocab.json": ids, "tokenizer_config.json": settings}
    write(directory, one, **files)
    return ids


def test_marian_begins_with_padding_and_never_predicts_it(tmp_path):
    ids = write_marian(tmp_path / "model", {"bad_words_ids": [[7], [5]]})
    source, target = side(tmp_path / "model"), side(tmp_path / "model", "target")
    pad = len(ids) - 1
    expected = [ids[piece] for piece in pieces_of("marian").encode(TEXT, out_type=str)]
    assert source.encode(TEXT) == target.encode(TEXT) == expected
    assert (source.source_start, target.target_start) == ((), (pad,))
    assert (target.eos_id, target.pad_id, target.forbidden_ids) == (0, pad, (5, 7))
    assert target.decode([pad, *expected, 0, 9]) == TEXT


def test_marians_target_languages_are_tokens_of_the_source(tmp_path):
    ids = write_marian(tmp_path / "model", more=(">>fra<<", ">>deu<<"))
    source = side(tmp_path / "model", target="deu")
    assert source.source_start == (ids[">>deu<<"],)
    assert side(tmp_path / "model", "target", target="deu").target_start == (len(ids) - 1,)
    assert side(tmp_path / "model").encode(f">>fra<< {TEXT}") == [
        ids[">>fra<<"],
        *source.encode(TEXT),
    ]


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        (
            {"source": "zuu"},
            "source_language=zuu: the model has no such language. Did you mean 'zu'?",
        ),
        ({"target": "en_US"}, "target_language=en_US: the model has no such language."),
    ],
)
def test_an_unknown_language_is_refused(languages, message, tmp_path):
    write_m2m(tmp_path / "model")
    with pytest.raises(ValueError) as error:
        for name in languages:
            side(tmp_path / "model", name, **languages)
    assert message in str(error.value)


def test_files_that_do_not_fit_are_refused(tmp_path):
    write_m2m(tmp_path / "codes", language_codes="m2m1000")
    with pytest.raises(ValueError, match="language_codes is 'm2m1000'; one of m2m100, wmt21 was"):
        side(tmp_path / "codes")
    write_marian(tmp_path / "words", {"bad_words_ids": [[7, 8]]})
    with pytest.raises(ValueError, match=r"bad_words_ids .* is \[\[7, 8\]\]; lists of one id"):
        side(tmp_path / "words")
    write_marian(tmp_path / "table")
    (tmp_path / "table" / "vocab.json").unlink()
    with pytest.raises(ValueError, match=r"vocab\.json is missing, which has the ids"):
        side(tmp_path / "table")
    write_m2m(tmp_path / "start")
    (tmp_path / "start" / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    with pytest.raises(ValueError, match="has decoder_start_token_id, the id before a translation"):
        side(tmp_path / "start", "target")
    files = {"sentencepiece.bpe.model": models.trained("fairseq")}
    write(tmp_path / "nllb", CONFIG, **files)
    with pytest.raises(ValueError, match="lists the tokens of the languages"):
        side(tmp_path / "nllb")
