"""Tests that declared options check their values, convert them, and describe themselves."""

import dataclasses

from absl.testing import parameterized

from lingvo_gshard import testing
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


@dataclasses.dataclass(frozen=True)
class More(Sizes):
    """Sizes, and one more."""

    depth: int = option(2, "Number of levels.", minimum=2)


class OptionsTest(testing.TestCase, parameterized.TestCase):
    def test_values_get_the_declared_types(self):
        found = Sizes(share=1e-3, limit=2, ids=[4, 0], names=["a,b"], extra=[1])
        self.assertEqual(found, Sizes(3, 0.001, 2.0, "red", (4, 0), ("a,b",), False, [1]))
        self.assertIs(type(found.limit), float)
        self.assertIs(type(found.ids), tuple)
        self.assertIsNone(Sizes().limit)
        self.assertEqual(Sizes.count, 3)
        self.assertTrue(hash(dataclasses.replace(found, extra=None)))

    @parameterized.parameters(
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
    )
    def test_wrong_values_are_named(self, values, message, name):
        with self.assertRaises(OptionError) as raised:
            Sizes(**values)
        self.assertStartsWith(str(raised.exception), message)
        self.assertEqual(raised.exception.option, name)

    def test_a_subclass_has_the_options_of_its_base(self):
        names = ["count", "share", "limit", "color", "ids", "names", "is_big"]
        self.assertEqual([*declared(Sizes)], names)
        self.assertEqual([*declared(More)], [*names, "depth"])
        self.assertEqual(declared(More)["depth"].help, "Number of levels.")
        for wrong in ({"depth": 1}, {"count": 0}):
            with self.assertRaises(OptionError):
                More(**wrong)

    def test_the_docstring_has_the_descriptions(self):
        self.assertIn(
            "Sizes of something.\n\nAttributes:\n  count: Number of things.\n", Sizes.__doc__
        )
        self.assertEndsWith(More.__doc__, "\n\nAttributes:\n  depth: Number of levels.")


if __name__ == "__main__":
    testing.main()
