"""Case: a small model that `python -m benchmarks parity` compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Rows, tokens of a row, and new tokens that are decoded after the beginning of each row.
ROWS, LENGTH, NEW_TOKENS = 3, 24, 16
# Tokens of each row that a language model goes on with: more than windows of the cases, fewer, one.
PROMPTS = (12, 5, 1)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with random weights.

    Attributes:
      option: what is particular to the model, in a few words.
      model_type: the model's family.
      config: values of the model's `config.json` that override or extend `shared`.
      shared: values of `config.json` that most cases share.
      start: the ids that translations begin with; empty for a language model.
    """

    option: str
    model_type: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shared: Mapping[str, Any] = dataclasses.field(default_factory=SIZES.copy)
    start: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The family and the option."""
        return f"{self.model_type}, {self.option}"

    @property
    def values(self) -> dict[str, Any]:
        """All values of its config that are not defaults of transformers."""
        return {**self.shared, **self.config}
