"""Seams: places of the library where features take part that it does not know.

A seam belongs to the module that calls its features, and says in its docstring what a feature is.
A feature registers itself when its module is imported:

    PRODUCT_RULES: Seam[ProductRule] = Seam("product_rules")  # the library

    @PRODUCT_RULES.register("adapters")                        # a feature, in a module of its own
    class Adapters(ProductRule): ...

`lingvo_gshard.features` names the modules of the package's own features. They are imported when
their seam is first used. The library runs without them, and a user's module registers as they do.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

from lingvo_gshard.core.config import names

Feature = TypeVar("Feature")
# The type of one feature, which may be a subclass.
One = TypeVar("One")

_TABLE = f"{__name__.partition('.')[0]}.features"


class Seam(Generic[Feature]):
    """The features that take part at one place, by name, in the order of registration."""

    def __init__(self, name: str):
        """Makes a seam without features, by its key in `lingvo_gshard.features.MODULES`."""
        self.name = name
        self._features: dict[str, Feature] = {}
        self._is_loaded = False

    def register(self, name: str) -> Callable[[One], One]:
        """Returns a decorator that adds a feature.

        Raises:
          ValueError: another feature has the name.
        """

        def add(feature: One) -> One:
            if name in self._features:
                raise ValueError(f"the seam {self.name!r} already has a feature {name!r}")
            self._features[name] = cast(Any, feature)
            return feature

        return add

    def items(self) -> list[tuple[str, Feature]]:
        """Returns the names and features."""
        self._load()
        return list(self._features.items())

    def __iter__(self) -> Iterator[Feature]:
        return iter([feature for _, feature in self.items()])

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._features

    def __getitem__(self, name: str) -> Feature:
        """Returns a feature.

        Raises:
          KeyError: no feature has the name; suggests the nearest one.
        """
        if name not in self:
            raise KeyError(f"{self.name}: {name!r}. {names.nearest(name, self._features)}")
        return self._features[name]

    def _load(self) -> None:
        """Imports the modules of the package's own features, once."""
        if self._is_loaded:
            return
        self._is_loaded = True
        if importlib.util.find_spec(_TABLE):
            for module in importlib.import_module(_TABLE).MODULES.get(self.name, ()):
                importlib.import_module(module)
