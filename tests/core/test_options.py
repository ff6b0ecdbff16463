"""Tests that declared options check their values, convert them, and describe themselves."""

import dataclasses

import pytest

from lingvo_gshard.core.options import OptionError, Options, declared, option


@dataclasses.dataclass(frozen=True)
class Sizes(Options):
    """Sizes of something."""

    count: int = option(3, "Number of things.", minimum=1, maximum=9)
    share: float = option(0.5, "Part of the things.", above=0, below=1)
    limit: float | None = option(None, "Largest size; None: any.", minimum=0)
    color: str = option("red", "Color of all things.", choices=("red", "green"))
    ids: tuple[int, ...] = option((), "Things that are taken.", minimum=0)
    names: tuple[str, ...] = option((), "Names of the things.")
    is_big: bool = option(False, "Whether things are big.")
    extra: object = None


def test_values_get_the_declared_types():
    found = Sizes(share=1e-3, limit=2, ids=[4, 0], names=["a,b"], extra=[1])
    assert found == Sizes(3, 0.001, 2.0, "red", (4, 0), ("a,b",), False, [1])
    assert type(found.limit) is float and type(found.ids) is tuple and Sizes().limit is None
    assert Sizes.count == 3 and hash(dataclasses.replace(found, extra=None))


@pytest.mark.parametrize(
    ("values", "message", "name"),
    [
        ({"count": 0}, "`count=0`: a whole number from 1 to 9 was expected", "count"),
        ({"count": 2.0}, "`count=2.0`: a whole number from 1 to 9 was expected", "count"),
        ({"count": True}, "`count=True`: a whole number from 1 to 9 was expected", "count"),
        ({"count": None}, "`count=None`: a whole number from 1 to 9 was expected", "count"),
        ({"share": 1}, "`share=1`: a number above 0 and below 1 was expected", "share"),
        ({"share": float("nan")}, "`share=nan`: a number above 0 and below 1 was expe", "share"),
        ({"limit": -1}, "`limit=-1`: a number of 0 or more was expected", "limit"),
        ({"color": "gren"}, "`color=gren` is unknown. Did you mean 'green'?", "color"),
        ({"color": "x"}, "`color=x` is unknown. Valid: green, red.", "color"),
        ({"ids": [1, -1]}, "`ids[1]=-1`: a whole number of 0 or more was expected", "ids[1]"),
        ({"ids": 7}, "`ids=7`: a list was expected", "ids"),
        ({"names": "ab"}, "`names=ab`: a list was expected", "names"),
        ({"names": ["a", 5]}, "`names[1]=5`: a string was expected", "names[1]"),
        ({"is_big": 1}, "`is_big=1`: True or False was expected", "is_big"),
    ],
)
def test_wrong_values_are_named(values, message, name):
    with pytest.raises(OptionError) as raised:
        Sizes(**values)
    assert str(raised.value).startswith(message) and raised.value.option == name


def test_a_subclass_has_the_options_of_its_base():
    names = ["count", "share", "limit", "color", "ids", "names", "is_big"]
    assert [*declared(Sizes)] == names
    assert [*declared(More)] == [*names, "depth"]
    assert declared(More)["depth"].help == "Number of levels."
    for wrong in ({"depth": 1}, {"count": 0}):
        with pytest.raises(OptionError):
            More(**wrong)


@dataclasses.dataclass(frozen=True)
class More(Sizes):
    """Sizes, and one more."""

    depth: int = option(2, "Number of levels.", minimum=2)


def test_the_docstring_has_the_descriptions():
    assert "Sizes of something.\n\nAttributes:\n  count: Number of things.\n" in Sizes.__doc__
    assert More.__doc__.endswith("\n\nAttributes:\n  depth: Number of levels.")
