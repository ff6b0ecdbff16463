"""WatchedKinds: how many kinds of tokens there are, for whoever counts tokens by kind."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class WatchedKinds:
    """Numbers of the kinds of tokens. A token's kind is its language * classes + its class.

    Attributes:
      languages: Number of languages.
      classes: Number of classes of tokens.
    """

    languages: int
    classes: int
