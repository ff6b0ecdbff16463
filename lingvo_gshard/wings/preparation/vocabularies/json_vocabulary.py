"""JsonVocabulary: a tokenizer.json of the tokenizers package as a vocabulary of a new model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import UserError
from lingvo_gshard.data import VOCABULARY_KINDS, encoding
from lingvo_gshard.wings.preparation.vocabularies.json_tokenizer import JsonTokenizer
from lingvo_gshard.wings.preparation.vocabularies.tokenizer_vocabulary import TokenizerVocabulary

# Names of the tokens that end a text, begin it, and fill batches, as published tokenizers have
# them. The first that is a special token of a tokenizer is taken. DeepSeek's names have full-width
# bars, and SentencePiece's sign for spaces.
_ENDS = (
    "</s> <eos> <|end_of_text|> <|endoftext|> <|im_end|> <\uff5cend\u2581of\u2581sentence\uff5c> "
    "[EOS] [SEP]"
).split()
_BEGINS = (
    "<s> <bos> <|begin_of_text|> <\uff5cbegin\u2581of\u2581sentence\uff5c> [BOS] [CLS]"
).split()
_PADS = "<pad> <|pad|> <|finetune_right_pad_id|> <\uff5c\u2581pad\u2581\uff5c> [PAD]".split()
_UNKNOWNS = ("<unk>", "[UNK]")
# Special tokens that a message shows.
_SHOWN = 20
# Keys of the object that holds a tokenizer.json and the names of the tokens that a user chose.
_TOKENIZER, _END, _BEGIN = "tokenizer", "end_token", "begin_token"


class JsonVocabulary(TokenizerVocabulary):
    """A tokenizer of the tokenizers package. Texts never give its special tokens.

    Only added tokens that are marked as special end or begin a text. A vocabulary may have a piece
    of such a name, which texts give.

    A tokenizer without a token that begins texts, or without padding, uses the token that ends
    texts.
    """

    suffix = ".json"

    def __init__(self, model: bytes, end_token: str = "", begin_token: str = ""):
        """Reads a tokenizer.json.

        Args:
          model: content of the file, or `model` of another vocabulary.
          end_token: the special token that ends a text; "": a known one.
          begin_token: the special token that begins a text; "": a known one.

        Raises:
          UserError: it is damaged, a token is no special one, or no known token ends a text.
        """
        content, chosen = _unwrap(model)
        chosen |= {k: v for k, v in ((_END, end_token), (_BEGIN, begin_token)) if v}
        tokenizer: Any = JsonTokenizer(content, "This is no tokenizer.json")
        self._tokenizer, self._found = tokenizer, tokenizer.found
        # "</s>" in a text is four characters and not the end of it.
        self._found.encode_special_tokens = True
        self.model = _wrap(content, chosen)
        added = self._found.get_added_tokens_decoder().items()
        self._special = {token.content: index for index, token in added if token.special}
        end, begin = self._chosen(_END, chosen, _ENDS), self._chosen(_BEGIN, chosen, _BEGINS)
        if end is None:
            raise UserError(
                f"No token ends a text; one of {', '.join(_ENDS)} was expected as a special token. "
                f"input.vocabulary.{_END} names another one of {self._listed()}"
            )
        pad, unknown = self._first(_PADS), map(self._found.token_to_id, _UNKNOWNS)
        self.eos_id, self.bos_id = end, end if begin is None else begin
        self.pad_id = end if pad is None else pad
        self.unk_id = next(filter(None.__ne__, unknown), end)
        self.end_ids, self.before, self.target_start = (end,), (self.bos_id,), (self.bos_id,)

    def _first(self, names: Iterable[str]) -> int | None:
        """Returns the id of the first name that is a special token."""
        return next((self._special[name] for name in names if name in self._special), None)

    def _chosen(self, key: str, chosen: Mapping[str, str], names: Iterable[str]) -> int | None:
        """Returns the id of a chosen token, or of a known one; UserError if it is not special."""
        if key not in chosen:
            return self._first(names)
        if chosen[key] not in self._special:
            raise UserError(
                f"input.vocabulary.{key} is {chosen[key]!r}, which is no special token; one of "
                f"{self._listed()} was expected"
            )
        return self._special[chosen[key]]

    def _listed(self) -> str:
        """Returns the special tokens, for messages."""
        names = sorted(self._special, key=self._special.__getitem__)
        return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "") or "none"

    def encode_batch(self, texts: Sequence[str], num_threads: int = 2) -> list[list[int]]:
        """Returns the ids of many lines, each as `encode` does.

        One thread stays in the calling thread; else the package chooses.
        """
        if num_threads == 1:
            return [self.encode(text) for text in texts]
        with encoding(texts):
            found = self._found.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    @classmethod
    def is_json(cls, content: bytes) -> bool:
        """Returns whether a file holds JSON, as opposed to a SentencePiece model."""
        try:
            return isinstance(json.loads(content), dict)
        except (ValueError, RecursionError):
            return False


VOCABULARY_KINDS.register("json")(JsonVocabulary)


def _wrap(content: bytes, chosen: Mapping[str, str]) -> bytes:
    """Returns a tokenizer.json together with the names of chosen tokens; as it is without any."""
    if not chosen:
        return content
    return json.dumps({_TOKENIZER: json.loads(content), **chosen}, ensure_ascii=False).encode()


def _unwrap(model: bytes) -> tuple[bytes, dict[str, str]]:
    """Returns the tokenizer.json and the names of chosen tokens that `_wrap` put together."""
    try:
        found = json.loads(model)
    except (ValueError, RecursionError):
        # The tokenizers package says what is wrong.
        return model, {}
    if not isinstance(found, dict) or not isinstance(found.get(_TOKENIZER), dict):
        return model, {}
    content = json.dumps(found[_TOKENIZER], ensure_ascii=False).encode()
    return content, {key: str(found[key]) for key in (_END, _BEGIN) if key in found}
