"""TokenContext: facts on the tokens of a pass that mixtures of experts need."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from lingvo_gshard.core import context, tf


@dataclasses.dataclass(frozen=True)
class GroupOrder:
    """The storage order of the token groups of a mixture of experts.

    Attributes:
      numbers: int [G], the number of each stored group.
      dimension: The dimension of G in the tensors that are computed.
      computed: int32 [G], the numbers as tensor operations of the program. The program then holds
        no constant of this size.
    """

    numbers: np.ndarray
    dimension: int = 0
    computed: tf.Tensor | None = None


class OnChoice(Protocol):
    """Takes part in the choices of routers whose tokens choose their experts."""

    def select(self, router: Any, selected: list) -> list:
        """Returns a token's experts in place of those selected; see `selection.settled`."""
        ...

    def assign(self, router: Any, choices: Any, assign: Callable[[Any], tuple]) -> tuple:
        """Returns the assignments of choices, which `assign` makes; see `TokenCapacity.route`."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenContext:
    """The extension of the context for mixtures of experts.

    Attributes:
      ids: int32 [B,L] ids of the tokens that are computed, or None if the caller set none.
      kinds: int32 [B,L] kinds of these tokens (`core.token_kinds`), or None if they are unknown.
      on_routing: Called with (layer, routing, mask [G,S], groups) by every mixture of experts; None
        if nobody counts.
      on_choice: Takes part in the choices of routers; None if nothing does.
      choices: Arrays [B,L,...] by name that `on_choice` reads. Parts of a batch have their rows.
      groups: The groups that a router routes, `groups.Groups`; None outside of layers with experts.
      group_order: The order of token groups, if they are not stored by their numbers.
      keeps_all: Whether experts compute every token sent to them, whatever their capacity.
    """

    ids: tf.Tensor | None = None
    kinds: tf.Tensor | None = None
    on_routing: Callable[..., None] | None = None
    on_choice: OnChoice | None = None
    choices: Mapping[str, tf.Tensor] | None = None
    groups: Any = None
    group_order: GroupOrder | None = None
    keeps_all: bool = False


def current() -> TokenContext:
    """Returns the extension of the current context."""
    return context.extension(TokenContext)


def override(**fields: object) -> contextlib.AbstractContextManager[context.Context]:
    """Changes fields of the extension inside a `with` block."""
    return context.override_extension(TokenContext, **fields)


def tokens(
    ids_BL: tf.Tensor, kinds_BL: tf.Tensor | None = None
) -> contextlib.AbstractContextManager[context.Context]:
    """Sets the int32 ids of the tokens that layers compute inside a `with` block.

    Args:
      kinds_BL: Their kinds, which watched routers count; see `core.token_kinds`.
    """
    return override(ids=ids_BL, kinds=kinds_BL)
