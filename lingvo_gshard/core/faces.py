"""Faces: functions of layers that stand outside of a layer's file, chosen by the layer's class.

A layer's file holds Params, weights and `fprop`. Decoding (inference/layers/) and facts (facts/)
are functions that a class registers:

    @face
    def flops(layer: Layer, shape: TokenShape) -> int:
        return ...  # for classes without a function

    @flops.register(Dense)
    def _(layer: Dense, shape: TokenShape) -> int: ...

A class without a function has the function of its nearest base class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from lingvo_gshard.core.errors import UserError

Given = ParamSpec("Given")
Result = TypeVar("Result", covariant=True)
Function = TypeVar("Function", bound=Callable[..., Any])


class Face(Protocol[Given, Result]):
    """A function whose first argument is a layer, or a part of one."""

    def __call__(self, layer: Any, /, *args: Given.args, **kwargs: Given.kwargs) -> Result: ...

    def register(self, cls: type) -> Callable[[Function], Function]:
        """Returns a decorator of the function for a class and for the classes derived from it."""
        ...


def face(default: Callable[Concatenate[Any, Given], Result]) -> Face[Given, Result]:
    """Decorates the function for classes that have registered none.

    Calling the face raises a UserError if the layer's class has a method of the face's name in
    place of a registered function. The method would be ignored.
    """
    chosen = functools.singledispatch(default)

    @functools.wraps(chosen)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_method(default, type(layer), chosen.registry)
        return chosen(layer, *args, **kwargs)

    return cast("Face[Given, Result]", call)


def _refuse_method(
    default: Callable[..., Any], cls: type, registered: Mapping[Any, Callable[..., Any]]
) -> None:
    """Raises UserError if a class has a method that stands before its registered function."""
    name = default.__name__
    for base in cls.__mro__:
        if base in registered:
            return
        if name in vars(base):
            raise UserError(
                f"{base.__name__}.{name} is a method, which nothing calls: make it a function with "
                f"@{name}.register({base.__name__}), where {name} is that of {default.__module__}"
            )
