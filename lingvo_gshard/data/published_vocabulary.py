"""PublishedVocabulary: the tokenizer of a published model, from the files it was published with."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import sentencepiece

from lingvo_gshard.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_JSON, SENTENCEPIECE_MODEL = "tokenizer.json", "tokenizer.model"
# What an import notes of the published tensors.
RECORD_FILE = "published.json"
# What is kept of a published model besides its weights.
KEPT_FILES = (
    RECORD_FILE,
    "config.json",
    "generation_config.json",
    TOKENIZER_JSON,
    SENTENCEPIECE_MODEL,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "README.md",
    "LICENSE",
)
_SAMPLE = "a"


class _Tokenizer(Protocol):
    """What a PublishedVocabulary asks of a tokenizer."""

    before: tuple[int, ...]
    size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece(self, index: int) -> str: ...


class PublishedVocabulary(Vocabulary):
    """The tokenizer of a published model, with the ids that it was trained with.

    Attributes:
      directory: the files.
      settings: the values of generation_config.json, over those of config.json.
      end_ids: ids that end a text; the first is `eos_id`.
    """

    def __init__(self, directory: pathlib.Path):
        """Reads the files of a published model.

        Args:
          directory: has tokenizer.json or tokenizer.model, and config.json.

        Raises:
          ValueError: a file is missing or damaged, or no id ends a text.
        """
        self.directory = directory
        self.settings = _json(directory / "config.json") | _json(
            directory / "generation_config.json"
        )
        self._tokenizer = _tokenizer(directory)
        self.before = self._tokenizer.before
        self.end_ids = _ids(self.settings.get("eos_token_id"))
        if not self.end_ids:
            raise ValueError(
                f"{directory}: neither config.json nor generation_config.json has eos_token_id, "
                "the id that ends a text"
            )
        self.eos_id = self.end_ids[0]
        # Without an id of their own, texts begin after the end of another.
        self.bos_id = next(
            iter((*self.before, *_ids(self.settings.get("bos_token_id")))), self.eos_id
        )
        self.pad_id = next(iter(_ids(self.settings.get("pad_token_id"))), self.eos_id)
        self.unk_id = self.eos_id

    @property
    def size(self) -> int:
        """The number of ids, those of added tokens included."""
        return self._tokenizer.size

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without those before and after it."""
        return self._tokenizer.encode(text)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 2) -> list[list[int]]:
        """Returns the ids of many texts, each as `encode` does."""
        del num_threads
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids up to the first that ends a text, without special ones."""
        kept = []
        for index in map(int, ids):
            if index in self.end_ids and kept:
                break
            if index < self.size and index not in self.before and index not in self.end_ids:
                kept.append(index)
        return self._tokenizer.decode(kept)

    def piece(self, index: int) -> str:
        """Returns the text of one piece, `▁` for a space."""
        return self._tokenizer.piece(int(index)) if index < self.size else ""

    def save(self, directory: str, name: str = "") -> str:
        """Copies the files into a directory and returns its path; makes the directory."""
        del name
        target = pathlib.Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        copy_files(self.directory, target)
        return directory

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublishedVocabulary) and self.directory == other.directory

    def __hash__(self) -> int:
        return hash(self.directory)


class _TokenizerJson:
    """A tokenizer of the tokenizers package."""

    def __init__(self, path: pathlib.Path):
        # Imported here: most runs need no tokenizers.
        import tokenizers

        try:
            self._found: tokenizers.Tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The package raises plain Exceptions.
            raise ValueError(f"{path} is no tokenizer: {error}") from None
        self._found.no_padding()
        self._found.no_truncation()
        self.size = self._found.get_vocab_size(with_added_tokens=True)
        self.before = self._ids_before()

    def _ids_before(self) -> tuple[int, ...]:
        """Returns the ids that the tokenizer puts before a text."""
        plain = self.encode(_SAMPLE)
        whole = self._found.encode(_SAMPLE, add_special_tokens=True).ids
        starts = range(len(whole) - len(plain) + 1)
        return tuple(whole[: next(i for i in starts if whole[i : i + len(plain)] == plain)])

    def encode(self, text: str) -> list[int]:
        return self._found.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._found.decode(list(ids), skip_special_tokens=True)

    def piece(self, index: int) -> str:
        return self._found.decode([index], skip_special_tokens=False).replace(" ", "▁")


class _SentencePiece:
    """A SentencePiece model with any special ids."""

    def __init__(self, path: pathlib.Path, adds_bos: bool):
        try:
            self._found = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except RuntimeError as error:
            raise ValueError(f"{path} is no SentencePiece model: {error}") from None
        self.size = self._found.vocab_size()
        bos_id = self._found.bos_id()
        self.before = (bos_id,) if adds_bos and bos_id >= 0 else ()

    def encode(self, text: str) -> list[int]:
        return self._found.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._found.decode(list(ids))

    def piece(self, index: int) -> str:
        return self._found.id_to_piece(index)


def _tokenizer(directory: pathlib.Path) -> _Tokenizer:
    if (directory / TOKENIZER_JSON).is_file():
        return _TokenizerJson(directory / TOKENIZER_JSON)
    if (directory / SENTENCEPIECE_MODEL).is_file():
        settings = _json(directory / "tokenizer_config.json")
        adds_bos = bool(settings.get("add_bos_token", True))
        return _SentencePiece(directory / SENTENCEPIECE_MODEL, adds_bos)
    raise ValueError(
        f"{directory} has no tokenizer: {TOKENIZER_JSON} or {SENTENCEPIECE_MODEL} was expected. "
        "tokenizer.save_pretrained(DIR) of transformers writes it"
    )


def copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies KEPT_FILES, as far as there are such, from one directory to another."""
    for name in KEPT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file without its nulls; empty if there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    return {name: value for name, value in found.items() if value is not None}


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
