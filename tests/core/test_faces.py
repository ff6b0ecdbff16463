"""Tests functions that are chosen by a layer's class."""

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.faces import face


class Base:
    pass


class Derived(Base):
    pass


class Other(Derived):
    pass


class OldKind(Base):
    def area(self, scale):
        return scale


class DerivedFromOldKind(OldKind):
    pass


@face
def area(shape, scale):
    """Returns an area."""
    return ("default", scale)


@area.register(Derived)
def derived_area(shape, scale):
    return ("derived", scale)


def test_the_function_of_the_nearest_base_class_is_called():
    assert area(Base(), 2) == ("default", 2)
    assert area(Derived(), scale=3) == ("derived", 3)
    assert area(Other(), 4) == ("derived", 4)
    assert area.__doc__ == "Returns an area."


def test_a_method_of_the_name_is_refused_and_not_ignored():
    for cls in (OldKind, DerivedFromOldKind):
        with pytest.raises(
            UserError, match=rf"OldKind.area is a.*@area.register\(OldKind\).*{__name__}"
        ):
            area(cls(), 1)


def test_a_registered_class_may_have_a_method_of_the_name():
    class Registered(OldKind):
        pass

    @area.register(Registered)
    def _(shape, scale):
        return ("registered", scale)

    assert area(Registered(), 1) == ("registered", 1)
