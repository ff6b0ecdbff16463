"""PublishedVocabulary: the tokenizer of a published model, from the files it was published with."""

from __future__ import annotations

import functools
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import sentencepiece

from lingvo_gshard.core import UserError, atomic, explained, objects
from lingvo_gshard.data import piece_places
from lingvo_gshard.wings.preparation.vocabularies import byte_ranks
from lingvo_gshard.wings.preparation.vocabularies.json_tokenizer import (
    LANGUAGE,
    JsonTokenizer,
    languages_in,
)
from lingvo_gshard.wings.preparation.vocabularies.tokenizer_vocabulary import (
    Tokenizer,
    TokenizerVocabulary,
)

TOKENIZER_JSON = "tokenizer.json"
# SentencePiece models with the ids of the published model.
SENTENCEPIECE_MODELS = ("tokenizer.model", "spiece.model")
# A SentencePiece model with other ids than the published model. The published model has the ids of
# fairseq or of vocab.json.
FAIRSEQ_MODEL = "sentencepiece.bpe.model"
SETTINGS, SPECIAL_TOKENS, ADDED_TOKENS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
VOCABULARY = "vocab.json"

# The languages of M2M-100 in the order of their tokens, which not all files list, by the value of
# `language_codes` (https://github.com/facebookresearch/fairseq/tree/main/examples/m2m_100).
_M2M_LANGUAGES = objects.table_beside(__file__, "m2m_languages.json", dict[str, str])
# fairseq's first ids. After a model's first three pieces, fairseq's ids are one higher than the
# model's.
_FAIRSEQ_IDS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}


class SentencePieceTokenizer:
    """A SentencePiece model, and tokens that stand for themselves wherever a text has them.

    These are the model's control symbols, such as `<s>` and `[INST]`, and the tokens that were
    added to it. The text before the first one is encoded as the model alone does.
    """

    languages: Mapping[str, int] = {}
    bytes: frozenset[int] = frozenset()

    def __init__(
        self, path: pathlib.Path, adds_bos: bool, added: Mapping[str, int], begins_anew: bool
    ):
        """Reads a model.

        Args:
          adds_bos: whether a text begins with the model's <s>.
          added: token -> id of the tokens that were added.
          begins_anew: whether the text after such a token gets a space before it, as the beginning
            of a text does (`legacy` of transformers). Else it is encoded as it stands.

        Raises:
          UserError: the file is no SentencePiece model.
        """
        self._found = _processor(path)
        self._inside, self._keeps_spaces = _without_first_space(self._found)
        self._begins_anew = begins_anew
        pieces = self._found.vocab_size()
        special = filter(self._is_special, range(pieces))
        self._ids = {self._found.id_to_piece(index): index for index in special} | dict(added)
        self._added = {index: token for token, index in added.items() if index >= pieces}
        self.size = max((pieces - 1, *self._added)) + 1
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        bos_id = self._found.bos_id()
        self.before = (bos_id,) if adds_bos and bos_id >= 0 else ()

    def _is_special(self, index: int) -> bool:
        return self._found.is_control(index) or self._found.is_unknown(index)

    def encode(self, text: str) -> list[int]:
        ids, end = [], 0
        for found in self._pattern.finditer(text):
            ids += [*self._encode_part(text[end : found.start()], end), self._ids[found[0]]]
            end = found.end()
        return ids + self._encode_part(text[end:], end)

    def places(self, text: str) -> list[tuple[int, int]]:
        places, end = [], 0
        for found in self._pattern.finditer(text):
            places += [*self._places_in(text[end : found.start()], end), found.span()]
            end = found.end()
        return places + self._places_in(text[end:], end)

    def _encode_part(self, part: str, start: int) -> list[int]:
        """Returns the ids of the part of a text that begins at `start`, without special tokens."""
        return self._model_of(part, start).encode(part)

    def _places_in(self, part: str, start: int) -> list[tuple[int, int]]:
        return piece_places(self._model_of(part, start), part, start)

    def _model_of(self, part: str, start: int) -> sentencepiece.SentencePieceProcessor:
        """Returns the model that encodes the part of a text that begins at `start`."""
        has_space = part.startswith(" ")
        if self._keeps_spaces:
            adds_space = self._begins_anew and not has_space
        else:
            # The model drops the space of the text.
            adds_space = self._begins_anew or has_space
        return self._found if adds_space or not start else self._inside

    def decode(self, ids: Sequence[int]) -> str:
        return self._found.decode([index for index in ids if index < self._found.vocab_size()])

    def piece(self, index: int) -> str:
        if index in self._added:
            return self._added[index]
        return self._found.id_to_piece(index) if index < self._found.vocab_size() else ""


class PiecesTokenizer:
    """A SentencePiece model that cuts texts into pieces whose ids a table has."""

    bytes: frozenset[int] = frozenset()

    def __init__(self, path: pathlib.Path, ids: Mapping[str, int], special: Mapping[str, int]):
        """Reads a model.

        Args:
          ids: piece -> id. `<unk>` stands for all other pieces.
          special: token that is no piece of a text -> id.

        Raises:
          UserError: the file is no SentencePiece model.
        """
        self._found = _processor(path)
        self._ids, self._unknown = ids, ids["<unk>"]
        self._pieces = {index: piece for piece, index in ids.items()}
        self._names = {index: token for token, index in special.items()}
        self.languages = languages_in({**ids, **special})
        self.size = max(max(self._pieces), max(self._names, default=0)) + 1
        self.before: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        language = self._language(text)
        pieces = self._found.encode(text[len(language) :], out_type=str)
        before = [self._ids[language]] if language else []
        return before + [self._ids.get(piece, self._unknown) for piece in pieces]

    def places(self, text: str) -> list[tuple[int, int]]:
        end = len(self._language(text))
        return [(0, end)][: min(end, 1)] + piece_places(self._found, text[end:], end)

    def _language(self, text: str) -> str:
        """Returns the token of the target's language at the start of a text; "" without one.

        Marian's models for several languages have it.
        """
        found = re.match(r">>\w+<<", text)
        return found[0] if found and found[0] in self._ids else ""

    def decode(self, ids: Sequence[int]) -> str:
        return self._found.decode_pieces(
            [self._pieces[i] for i in ids if i in self._pieces and i not in self._names]
        )

    def piece(self, index: int) -> str:
        return self._names.get(index) or self._pieces.get(index, "")


def tokenizer_of(directory: pathlib.Path, side: str = "source") -> Tokenizer:
    """Returns the tokenizer of a published model.

    Args:
      side: "source" or "target": Marian has a tokenizer for each.

    Raises:
      UserError: a file is missing or damaged.
    """
    settings, path = read_json(directory / SETTINGS), directory / TOKENIZER_JSON
    if path.is_file():
        found = objects.read_bytes(path).decode("utf-8", "replace"), path
    else:
        found = byte_ranks.in_directory(directory, settings)
    if found:
        tokenizer: Any = JsonTokenizer(found[0], f"{found[1]} is no tokenizer")
        return tokenizer
    if (directory / f"{side}.spm").is_file():
        return _marian(directory, side, settings)
    if (directory / FAIRSEQ_MODEL).is_file():
        return _fairseq(directory, settings)
    for name in SENTENCEPIECE_MODELS:
        if (directory / name).is_file():
            is_t5 = name == "spiece.model"
            # transformers takes null for False.
            written = read_json(directory / SETTINGS, keeps_nulls=True)
            adds_bos = bool(written.get("add_bos_token", not is_t5))
            added = _added_tokens(directory, settings)
            if is_t5:
                count = int(settings.get("extra_ids", 100))
                first = _processor(directory / name).vocab_size()
                # Sentinels follow all pieces, the last one first (arXiv 1910.10683, 3.1.4).
                added |= {f"<extra_id_{i}>": first + count - 1 - i for i in range(count)}
            begins_anew = bool(settings.get("legacy", True))
            return SentencePieceTokenizer(directory / name, adds_bos, added, begins_anew)
    raise UserError(
        f"{directory} has no tokenizer: {TOKENIZER_JSON} or {SENTENCEPIECE_MODELS[0]} was "
        "expected. tokenizer.save_pretrained(DIR) of transformers writes it. Encoder-decoders may "
        f"have {SENTENCEPIECE_MODELS[1]}, {FAIRSEQ_MODEL} or source.spm instead"
    )


def _marian(directory: pathlib.Path, side: str, settings: Mapping[str, Any]) -> Tokenizer:
    """Returns Marian's tokenizer of one side: pieces with the ids of a JSON file."""
    is_separate = side == "target" and settings.get("separate_vocabs", False)
    ids = _vocabulary(directory / ("target_vocab.json" if is_separate else VOCABULARY))
    names = {token: ids[token] for token in ("<pad>", "</s>", "<unk>") if token in ids}
    return PiecesTokenizer(directory / f"{side}.spm", ids, names)


def _fairseq(directory: pathlib.Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer of M2M-100, or of NLLB: pieces, then a token for each language."""
    if (directory / VOCABULARY).is_file():
        ids = _vocabulary(directory / VOCABULARY)
        special = _m2m_tokens(directory, settings, first=max(ids.values()) + 1)
    else:
        model = _processor(directory / FAIRSEQ_MODEL)
        pieces = {model.id_to_piece(i): i + 1 for i in range(3, model.vocab_size())}
        ids = {**_FAIRSEQ_IDS, **pieces}
        special = _listed_tokens(directory, settings, first=max(ids.values()) + 1)
    names = special | {token: ids[token] for token in _FAIRSEQ_IDS if token in ids}
    return PiecesTokenizer(directory / FAIRSEQ_MODEL, ids, names)


def _m2m_tokens(directory: pathlib.Path, settings: Mapping[str, Any], first: int) -> dict[str, int]:
    """Returns the ids of M2M-100's language tokens; UserError if its languages are not known."""
    name = settings.get("language_codes", "m2m100")
    if name not in _M2M_LANGUAGES:
        raise UserError(
            f"{directory / SETTINGS}: language_codes is {name!r}; one of "
            f"{', '.join(_M2M_LANGUAGES)} was expected"
        )
    codes = _M2M_LANGUAGES[name].split()
    return {f"__{code}__": first + place for place, code in enumerate(codes)}


def _listed_tokens(
    directory: pathlib.Path, settings: Mapping[str, Any], first: int
) -> dict[str, int]:
    """Returns the ids of tokens after the pieces, as files list them; UserError if none does."""
    added = _added_tokens(directory, settings)
    if any(index >= first for index in added.values()):
        return {token: index for token, index in added.items() if index >= first}
    for found in (settings, read_json(directory / SPECIAL_TOKENS)):
        for name in ("additional_special_tokens", "extra_special_tokens"):
            listed = found.get(name, ())
            listed = listed.values() if isinstance(listed, dict) else listed
            tokens = [t if isinstance(t, str) else t["content"] for t in listed]
            if any(map(LANGUAGE.fullmatch, tokens)):
                kept = [token for token in tokens if token not in _FAIRSEQ_IDS]
                return {token: first + place for place, token in enumerate(kept)}
    raise UserError(
        f"{directory}: neither {SETTINGS}, {ADDED_TOKENS} nor {SPECIAL_TOKENS} lists the tokens of "
        "the languages; tokenizer.save_pretrained(DIR) of transformers writes them"
    )


def _added_tokens(directory: pathlib.Path, settings: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids of the tokens that files list as added to a model."""
    return byte_ranks.listed_tokens(settings) | read_json(directory / ADDED_TOKENS)


def _vocabulary(path: pathlib.Path) -> dict[str, int]:
    """Returns piece -> id from a JSON file; UserError if there is none, or no ids are in it."""
    found = read_json(path)
    if not found:
        raise UserError(f"{path} is missing, which has the ids of a SentencePiece model's pieces")
    if "<unk>" not in found or not all(isinstance(index, int) for index in found.values()):
        raise UserError(f"{path} is no table of ids: one with <unk> was expected")
    return found


def _processor(path: pathlib.Path) -> sentencepiece.SentencePieceProcessor:
    with explained(f"{path} is no SentencePiece model", RuntimeError):
        return sentencepiece.SentencePieceProcessor(model_proto=objects.read_bytes(path))


def _without_first_space(
    model: sentencepiece.SentencePieceProcessor,
) -> tuple[sentencepiece.SentencePieceProcessor, bool]:
    """Returns a model that puts no space before a text, and whether it keeps spaces of the text."""
    # Imports protobuf, which only these models need.
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    description = messages.ModelProto.FromString(model.serialized_model_proto())
    description.normalizer_spec.add_dummy_prefix = False
    keeps_spaces = not description.normalizer_spec.remove_extra_whitespaces
    found = sentencepiece.SentencePieceProcessor(model_proto=description.SerializeToString())
    return found, keeps_spaces


def read_json(path: pathlib.Path, keeps_nulls: bool = False) -> dict[str, Any]:
    """Returns the object in a JSON file, {} without one. Keys of null may be left out.

    Raises:
      UserError: it is no JSON object.
    """
    try:
        found = atomic.loads(objects.read_text(path))
        return {name: v for name, v in found.items() if keeps_nulls or v is not None}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, RecursionError, OSError) as error:
        raise UserError(f"{path} is no JSON object: {error}") from None


# File with an import's notes on the published tensors.
RECORD_FILE = "published.json"
# File with the scales of the tensors that were published in FP8.
SCALES_FILE = "published_scales.safetensors"
# Files of a published model that are kept besides its weights.
KEPT_FILES = objects.table_beside(__file__, "kept_files.json", tuple[str, ...])

_T = TypeVar("_T")


class PublishedVocabulary(TokenizerVocabulary):
    """The tokenizer of a published model, with the ids that it was trained with.

    Attributes:
      settings: the values of config.json, overridden by generation_config.json.
      tokenizer_settings: the values of tokenizer_config.json.
      end_ids: ids that end a text; the first is `eos_id`.
    """

    def __init__(self, directory: pathlib.Path):
        """Reads a directory with a tokenizer and config.json.

        Raises:
          UserError: a file is missing or damaged, or no id ends a text.
        """
        self.directory = directory
        self.settings = read_json(directory / "config.json")
        self.settings |= read_json(directory / "generation_config.json")
        self.tokenizer_settings = read_json(directory / SETTINGS)
        self._tokenizer = self._read()
        self.before = self._tokenizer.before
        self.end_ids = ids_of(self.settings.get("eos_token_id"))
        if not self.end_ids:
            raise UserError(
                f"{directory}: neither config.json nor generation_config.json has eos_token_id, "
                "the id that ends a text"
            )
        self.eos_id = self.end_ids[0]
        # Without an id of their own, texts begin after the end of another.
        self.bos_id = next(
            iter((*self.before, *ids_of(self.settings.get("bos_token_id")))), self.eos_id
        )
        self.pad_id = next(iter(ids_of(self.settings.get("pad_token_id"))), self.eos_id)
        self.unk_id = self.eos_id

    def _read(self) -> Tokenizer:
        return tokenizer_of(self.directory)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids up to the first that ends a text, without special ones."""
        kept = []
        for index in map(int, ids):
            if index in self.end_ids and kept:
                break
            if self._has_text(index):
                kept.append(index)
        return self._tokenizer.decode(kept)

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of all ids. Special tokens, such as the end of a text, have no text."""
        return self._tokenizer.decode([index for index in map(int, ids) if self._has_text(index)])

    def _has_text(self, index: int) -> bool:
        return index < self.size and index not in self._unspoken

    @functools.cached_property
    def _unspoken(self) -> frozenset[int]:
        """The ids that are no part of a text."""
        return frozenset((*self.before, *self.end_ids))

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


def loaded(tokenizers: _T | None) -> _T:
    """Returns what was loaded from a checkpoint; UserError if nothing was."""
    if tokenizers is None:
        raise UserError(
            "the tokenizer of a published model is in the checkpoint of an imported run; "
            "gshard-import makes one"
        )
    return tokenizers


def copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies the KEPT_FILES that exist from one directory to another."""
    for name in KEPT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def ids_of(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns the ids that a setting names: one, several, or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
