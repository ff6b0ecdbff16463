"""Tokenizers of ranked bytes as a tokenizer.json: tekken.json of Mistral, and files of tiktoken.

Such a file orders the tokens of a byte-level BPE by their merges
(https://github.com/openai/tiktoken). The tokenizers package needs the pairs that make each token.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from lingvo_gshard.core import UserError, atomic, explained, objects


class _Known(msgspec.Struct, frozen=True):
    """Facts that files of ranks leave out, by the name of the file.

    Attributes:
      patterns: regular expressions of the parts of a text, as the programs of OpenAI, Llama 3
        (https://github.com/meta-llama/llama-models) and Kimi have them.
      ids: special token -> id of OpenAI's files
        (https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py).
      in_order: special tokens without ids: the first of Llama 3, which follow the others, and the
        tokens of tekken.json before version 7 (https://github.com/mistralai/mistral-common).
      tokenizer: a tokenizer.json without tokens.
      added_token: what a tokenizer.json says of each special token.
    """

    patterns: dict[str, str]
    ids: dict[str, dict[str, int]]
    in_order: dict[str, list[str]]
    tokenizer: dict[str, Any]
    added_token: dict[str, bool]


KNOWN = objects.table_beside(__file__, "byte_ranks.json", _Known)
_MORE_OF_LLAMA3 = [f"<|reserved_special_token_{index}|>" for index in range(2, 247)]

# Files of published models: Mistral's, Kimi's, and Llama 3's, whose name others give another kind.
TEKKEN, KIMI, _LLAMA3_FILE = "tekken.json", "tiktoken.model", "tokenizer.model"


def in_directory(
    directory: pathlib.Path, settings: Mapping[str, Any]
) -> tuple[str, pathlib.Path] | None:
    """Returns the tokenizer.json of a published model and its file; None for another kind.

    Raises:
      UserError: the file is damaged.
    """
    path = directory / TEKKEN
    if path.is_file():
        with explained(str(path), ValueError):
            return of_tekken(atomic.loads(objects.read_bytes(path))), path
    for name in (KIMI, _LLAMA3_FILE):
        path = directory / name
        ranks = read_ranks(objects.read_bytes(path)) if path.is_file() else None
        if ranks is not None:
            if name == KIMI:
                pattern, special = KNOWN.patterns["kimi"], listed_tokens(settings)
                return tokenizer_json(ranks, pattern, special), path
            return of_llama3(ranks), path
    return None


def listed_tokens(settings: Mapping[str, Any]) -> dict[str, int]:
    """Returns special token -> id, as tokenizer_config.json lists them."""
    listed = settings.get("added_tokens_decoder", {})
    return {str(entry["content"]): int(index) for index, entry in listed.items()}


def is_tekken(content: Mapping[str, Any]) -> bool:
    """Returns whether a JSON object is a tekken.json."""
    config = content.get("config")
    return isinstance(content.get("vocab"), list) and isinstance(config, dict)


def of_tekken(content: Mapping[str, Any]) -> str:
    """Returns the tokenizer.json of a tekken.json, UserError if damaged. Texts begin with `<s>`."""
    try:
        config = content["config"]
        first, size = config["default_num_special_tokens"], config["default_vocab_size"]
        entries = sorted(content["vocab"], key=lambda entry: entry["rank"])[: size - first]
        ranks = {
            base64.b64decode(entry["token_bytes"], validate=True): first + entry["rank"]
            for entry in entries
        }
        listed = content.get("special_tokens") or [
            {"rank": rank, "token_str": token}
            for rank, token in enumerate(KNOWN.in_order["tekken"])
        ]
        special = {str(entry["token_str"]): int(entry["rank"]) for entry in listed}
        return tokenizer_json(ranks, config["pattern"], special, begin="<s>")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"this is no tekken.json: {error!r}") from None


def read_ranks(content: bytes) -> dict[bytes, int] | None:
    """Returns the ranks in a file of tiktoken, lines of a token in base64 and its rank; or None."""
    ranks: dict[bytes, int] = {}
    try:
        for line in content.splitlines():
            token, rank = line.split()
            # Whisper's file has an empty token, which no text gives.
            if token != b"=":
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        return None
    return ranks or None


def of_openai(ranks: Mapping[bytes, int], name: str) -> str:
    """Returns the tokenizer.json of a file that OpenAI publishes, such as "o200k_base".

    Raises:
      UserError: the encoding is unknown, so that its pattern is not known.
    """
    if name not in KNOWN.ids:
        raise UserError(
            f"the file does not say how tiktoken splits texts, and its name is none of "
            f"{', '.join(f'{known}.tiktoken' for known in KNOWN.ids)}"
        )
    return tokenizer_json(ranks, KNOWN.patterns[name], KNOWN.ids[name])


def of_llama3(ranks: Mapping[bytes, int]) -> str:
    """Returns the tokenizer.json of Llama 3's tokenizer.model. Each text begins with a token."""
    names = [*KNOWN.in_order["llama3"], *_MORE_OF_LLAMA3]
    special = {token: len(ranks) + index for index, token in enumerate(names)}
    return tokenizer_json(ranks, KNOWN.patterns["llama3"], special, begin=names[0])


def tokenizer_json(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], begin: str = ""
) -> str:
    """Returns a tokenizer.json that encodes as tiktoken does.

    Args:
      ranks: token -> its id. Tokens with lower ids are merged first.
      pattern: regular expression of the parts of a text that are encoded one by one.
      special: special token -> its id.
      begin: the special token that texts begin with; "": none.
    """
    letters = _letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {names[token]: index for token, index in ranks.items()} | dict(special)
    # Every id has a token, so that there are as many tokens as ids.
    missing = set(range(max(vocabulary.values()) + 1)).difference(vocabulary.values())
    reserved = {f"<|reserved_{index}|>": index for index in missing}
    added = sorted({**special, **reserved}.items(), key=lambda item: item[1])
    found = copy.deepcopy(KNOWN.tokenizer)
    found["added_tokens"] = [
        {"id": index, "content": token, **KNOWN.added_token} for token, index in added
    ]
    found["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    found["post_processor"] = _begin_with(begin, special[begin]) if begin else None
    merges = [[names[left], names[right]] for left, right in _pairs(ranks)]
    found["model"] |= {"vocab": vocabulary | reserved, "merges": merges}
    return json.dumps(found, ensure_ascii=False)


def _pairs(ranks: Mapping[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    """Yields the pairs of tokens that make a token, in the order of the tokens made."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:end], token[end:]) for end in range(1, len(token)))
        yield from (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks)


def _letters() -> dict[int, str]:
    """Returns the letter that stands for each byte in a tokenizer.json, as GPT-2 chose them.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in shown}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _begin_with(token: str, index: int) -> dict[str, Any]:
    """Returns the post-processor that puts a token before a text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, first, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }
