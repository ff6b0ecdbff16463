"""Tokens as JSON values."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lingvo_gshard.inference.requests import END


def tokens_json(
    pieces: Sequence[str], log_probabilities: Sequence[float], reason: str = ""
) -> list[dict]:
    """Returns tokens with their log-probabilities, that of the end included if it was chosen.

    Args:
      pieces: the text of each token.
      log_probabilities: that of each token, and of the end.
      reason: why the text ended.
    """
    end = ["</s>"] if reason == END else []
    return [
        {"text": piece, "log_probability": value}
        for piece, value in zip([*pieces, *end], log_probabilities, strict=True)
    ]


def server_sent(value: object, event: str = "") -> str:
    """Returns a server-sent event with a JSON value as its data."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n"
