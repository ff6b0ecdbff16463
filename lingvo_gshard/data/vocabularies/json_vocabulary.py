"""JsonVocabulary: a tokenizer.json of the tokenizers package as a vocabulary of a new model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.vocabularies.published_vocabulary import byte_ids
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary

# Names of the tokens that end a text, begin it, and fill batches, as published tokenizers have
# them. The first that a tokenizer has is taken.
_ENDS = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "[EOS]", "[SEP]")
_BEGINS = ("<s>", "<bos>", "<|begin_of_text|>", "[BOS]", "[CLS]")
_PADS = ("<pad>", "<|pad|>", "<|finetune_right_pad_id|>", "[PAD]")
_UNKNOWNS = ("<unk>", "[UNK]")


class JsonVocabulary(Vocabulary):
    """A tokenizer of the tokenizers package. Texts never give its special tokens.

    A tokenizer without a token that begins texts, or without padding, uses the token that ends
    texts.
    """

    can_sample = False
    suffix = ".json"

    def __init__(self, model: bytes):
        """Reads a tokenizer.json.

        Args:
          model: content of the file.

        Raises:
          UserError: it is damaged, or no known token ends a text.
        """
        # Imported here: most runs need no tokenizers.
        import tokenizers

        try:
            self._found = tokenizers.Tokenizer.from_str(model.decode("utf-8"))
        except Exception as error:  # The package raises plain Exceptions.
            raise UserError(f"This is no tokenizer.json: {error}") from None
        self._found.no_padding()
        self._found.no_truncation()
        self._bytes = byte_ids(self._found)
        # "</s>" in a text is four characters and not the end of it.
        self._found.encode_special_tokens = True
        self.model = model
        end = self._first(_ENDS)
        if end is None:
            raise UserError(f"No token ends a text; one of {', '.join(_ENDS)} was expected")
        begin, pad, unknown = map(self._first, (_BEGINS, _PADS, _UNKNOWNS))
        self.eos_id, self.bos_id = end, end if begin is None else begin
        self.pad_id = end if pad is None else pad
        self.unk_id = end if unknown is None else unknown
        self.end_ids, self.before, self.target_start = (end,), (self.bos_id,), (self.bos_id,)

    def _first(self, names: Iterable[str]) -> int | None:
        return next(filter(None.__ne__, map(self._found.token_to_id, names)), None)

    @property
    def size(self) -> int:
        """The number of ids, including added tokens."""
        return self._found.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of one line, without ids that begin or end a text."""
        return self._found.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], num_threads: int = 2) -> list[list[int]]:
        """Returns the ids of many lines, each as `encode` does.

        Args:
          texts: the lines.
          num_threads: 1 stays in the calling thread; else the package chooses.
        """
        if num_threads == 1:
            return [self.encode(text) for text in texts]
        found = self._found.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def piece(self, index: int) -> str:
        """Returns the text of one piece, `▁` for a space."""
        # Decoders drop the space at the start of a text.
        token = self._found.id_to_token(int(index)) or ""
        if token.startswith("▁"):
            return token
        return self._found.decode([int(index)], skip_special_tokens=False).replace(" ", "▁")

    def is_byte(self, index: int) -> bool:
        """Returns whether an id is one byte, whose text depends on all bytes beside it."""
        return index in self._bytes

    def _decode_kept(self, ids: Sequence[int]) -> str:
        return self._found.decode(list(ids), skip_special_tokens=True)

    @classmethod
    def is_json(cls, content: bytes) -> bool:
        """Returns whether a file holds JSON, as opposed to a SentencePiece model."""
        try:
            return isinstance(json.loads(content), dict)
        except (ValueError, RecursionError):
            return False
