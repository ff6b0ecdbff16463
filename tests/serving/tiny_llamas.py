"""Tiny Llamas with published tokenizers whose tokens are bytes, spaces and parts of characters."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import tokenizers

import lingvo_gshard as gshard
from lingvo_gshard.wings.serving.model import ServedModel
from tests.open_models import published

LENGTH = 32
UNKNOWN, BOS, EOS, END = range(4)
# Both vocabularies have as many ids.
SIZE = 22
_SPECIAL = ("<unk>", "<s>", "</s>", "<end>")
# A character of two bytes, one of three, and the end of a line.
_BYTES = sorted("é€\n".encode())


@dataclasses.dataclass(frozen=True)
class TinyLlama:
    """A served model and what tests compare it with.

    Attributes:
      served: the model.
      tensors: its weights as they were published.
      tokenizer: its tokenizer, used without this package.
      bos: ids before each text.
    """

    served: ServedModel
    tensors: dict[str, np.ndarray]
    tokenizer: tokenizers.Tokenizer
    bos: tuple[int, ...]


def make(directory: pathlib.Path, kind: str) -> TinyLlama:
    """Imports a tiny Llama that texts end with EOS or END.

    Args:
      directory: an empty directory.
      kind: "sentencepiece": pieces with ▁ for a space, single bytes, and <s> before a text, as
        Llama 2 has them; "bytes": pieces of bytes and nothing before a text, as Qwen has them.
    """
    tokenizer = _sentencepiece() if kind == "sentencepiece" else _byte_level()
    size = len(tokenizer["model"]["vocab"])
    sizes = {"vocab_size": size}
    tensors = published.write(directory / "model", sizes=sizes)
    text = json.dumps(tokenizer, ensure_ascii=False)
    (directory / "model" / "tokenizer.json").write_text(text, encoding="utf-8")
    gshard.import_model(directory / "model", directory / "run", length=LENGTH)
    served = ServedModel.of_run(gshard.load(directory / "run"))
    bos = (BOS,) if kind == "sentencepiece" else ()
    return TinyLlama(served, tensors, tokenizers.Tokenizer.from_str(text), bos)


def _sentencepiece() -> dict:
    """Returns a tokenizer.json in the way of Llama 2's."""
    pieces = [f"<0x{byte:02X}>" for byte in _BYTES]
    pieces += ["▁", "a", "b", ".", "▁a", "ab", "▁ab", "b.", "é", "▁é", "▁▁", "€"]
    vocabulary = {piece: index for index, piece in enumerate((*_SPECIAL, *pieces))}
    merges = ["▁ a", "a b", "▁a b", "b .", "▁ é", "▁ ▁"]
    decoder = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    normalizer = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    return {
        "version": "1.0",
        "added_tokens": _added(),
        "normalizer": {"type": "Sequence", "normalizers": normalizer},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges}
        | {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"},
        "decoder": {"type": "Sequence", "decoders": decoder},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_special("<s>"), {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
        },
    }


def _byte_level() -> dict:
    """Returns a tokenizer.json in the way of GPT-2's."""
    shown = {byte: _shown(byte) for byte in (*_BYTES, *b" ab.")}
    pieces = list(shown.values())
    space, a, b, dot = (shown[byte] for byte in b" ab.")
    merges = [(space, a), (a, b), (space + a, b), (b, dot), (shown[0xC3], shown[0xA9])]
    merges += [(space, space), (dot, shown[0xE2]), (shown[0x82], shown[0xAC])]
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: index for index, piece in enumerate((*_SPECIAL, *pieces))}
    return {
        "version": "1.0",
        "added_tokens": _added(),
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        | {"use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [" ".join(m) for m in merges]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        | {"use_regex": False},
    }


def _shown(byte: int) -> str:
    """Returns the character that stands for a byte in a vocabulary of bytes."""
    printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
    others = [b for b in range(256) if not (0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE)]
    return chr(byte) if printable else chr(256 + others.index(byte))


def _special(name: str) -> dict:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def _added() -> list[dict]:
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False}
    return [
        {"id": index, "content": name, "normalized": False} | flags
        for index, name in enumerate(_SPECIAL)
    ]
