"""Finds messages to try with a chat model, where the model names some."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from lingvo_gshard.core import UserError, objects
from lingvo_gshard.data import TextInput
from lingvo_gshard.wings.fine_tuning.conversations.conversation_input import ConversationInput
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import PublishedVocabulary

_CARD = "README.md"
_METADATA = re.compile(r"---\r?\n(.{,65536}?)\r?\n---\r?\n", re.DOTALL)
_MOST = 4
# Longer messages do not fit onto a button.
_LONGEST = 200


def example_prompts_of(input_: TextInput) -> tuple[str, ...]:
    """Returns the first messages of a user that the run's Params or the model's card give.

    A card lists them as `widget`: https://huggingface.co/docs/hub/model-cards-widgets
    """
    given = input_.p.examples if isinstance(input_, ConversationInput) else ()
    vocabulary = input_.vocabulary
    if not given and isinstance(vocabulary, PublishedVocabulary):
        given = map(_message_of, _widget(vocabulary.directory / _CARD))
    texts = (each.strip() for each in given if isinstance(each, str))
    return tuple(text for text in texts if 0 < len(text) <= _LONGEST)[:_MOST]


def _widget(card: pathlib.Path) -> list[Any]:
    """Returns the list `widget` of a model card's metadata; empty if it has none."""
    # Imported here: most runs have no card.
    import yaml

    try:
        metadata = _METADATA.match(objects.read_text(card))
        found = yaml.safe_load(metadata[1]) if metadata else None
    except (OSError, UserError, yaml.YAMLError, ValueError, RecursionError):
        return []
    widget = found.get("widget") if isinstance(found, dict) else None
    return widget if isinstance(widget, list) else []


def _message_of(example: Any) -> Any:
    """Returns the text of an example, or the first message of a user in its conversation."""
    try:
        turns = [turn["content"] for turn in example["messages"] if turn["role"] == "user"]
        return turns[0] if turns else None
    except (TypeError, KeyError):
        return example.get("text") if isinstance(example, dict) else None
