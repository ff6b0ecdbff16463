"""Reads the vocabulary files of others that a user names."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from lingvo_gshard.core import UserError, explained, names, objects
from lingvo_gshard.data import Vocabulary
from lingvo_gshard.wings.preparation.vocabularies import byte_ranks, published_vocabulary
from lingvo_gshard.wings.preparation.vocabularies.json_vocabulary import JsonVocabulary

_TIKTOKEN = ".tiktoken"


def of_others(
    files: str | Sequence[str], end_token: str = "", begin_token: str = ""
) -> tuple[Vocabulary, ...]:
    """Returns the vocabularies in files of others, used as they are.

    Args:
      files: one file or several: SentencePiece models, tokenizer.json of the tokenizers package,
        tekken.json, or files that tiktoken reads, by their published names.
      end_token: the token of a tokenizer.json that ends a text; "": a known one.
      begin_token: the token of a tokenizer.json that begins a text; "": a known one.

    Raises:
      UserError: a file is missing, or is no vocabulary.
    """
    return tuple(_of_others(path, end_token, begin_token) for path in paths_of(files))


def paths_of(files: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the paths of a setting that names one file, or directory with it, or several."""
    return tuple(_file_in(os.path.expanduser(path)) for path in names.listed(files))


def _file_in(path: str) -> str:
    """Returns the tokenizer in the directory of a published model; another path as it is."""
    known = published_vocabulary.TOKENIZER_JSON, *published_vocabulary.SENTENCEPIECE_MODELS
    return next(filter(os.path.isfile, (os.path.join(path, name) for name in known)), path)


def _unranked(content: bytes, name: str) -> bytes:
    """Returns the tokenizer.json of a tekken.json or of a file of tiktoken; others as they are."""
    if name.endswith(_TIKTOKEN):
        ranks = byte_ranks.read_ranks(content)
        if ranks is None:
            raise UserError("the file has no ranks; lines of base64 and a number were expected")
        return byte_ranks.of_openai(ranks, name.removesuffix(_TIKTOKEN)).encode()
    if JsonVocabulary.is_json(content):
        found = json.loads(content)
        return byte_ranks.of_tekken(found).encode() if byte_ranks.is_tekken(found) else content
    return content


def _of_others(path: str, end_token: str, begin_token: str) -> Vocabulary:
    try:
        content = objects.read_bytes(path)
    except OSError as error:
        raise UserError(
            f"input.vocabulary.files: {path}: {error.strerror}; a SentencePiece model or a "
            "tokenizer.json was expected"
        ) from None
    with explained(f"input.vocabulary.files: {path}", ValueError):
        content = _unranked(content, os.path.basename(path))
        if JsonVocabulary.is_json(content):
            return JsonVocabulary(content, end_token, begin_token)
        found = Vocabulary(content)
    if end_token or begin_token:
        raise UserError(
            f"input.vocabulary.files: {path} is a SentencePiece model, which has an end and a "
            "beginning of its own; input.vocabulary.end_token and begin_token are for a "
            "tokenizer.json"
        )
    return found
