"""Tests what is found as markup and placeholders, and the policies."""

import pytest

from lingvo_gshard.wings.preparation.cleaning import markup
from lingvo_gshard.wings.preparation.cleaning.cleaner import Cleaner
from lingvo_gshard.wings.preparation.cleaning.markup import Policy


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a < b and c > d & e", []),
        ("<b>bold</b>", ["<b", "</b"]),
        ('<a href="x?y=1">link</a><br/>', ["<a", "</a", "<br"]),
        ("<0>first</0> <12>", ["<0", "</0", "<12"]),
        ("x &amp; y &#39; &#x27;", ["&amp;", "&#39;", "&#x27;"]),
        ("I <3 you, AT&T;", []),
    ],
)
def test_markup(text, found):
    assert markup.markup(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("100% of it costs $5, a@b.org", []),
        ("%% is %", []),
        ("%s of %d, %-5.2f %ld", ["%s", "%d", "%-5.2f", "%ld"]),
        ("%2$s of %1$s", ["%s", "%s"]),
        ("%(name)s %(count)05d", ["%(name)s", "%(count)05d"]),
        ("{0} {name} {n, plural, other} {{x}} ${y}", None),
        ("%{count} %1 of %L2 %n", ["%{count}", "%1", "%L2", "%n"]),
        ("$HOME @VERSION@", ["$HOME", "@VERSION@"]),
        ("5 %discount and 50%off", []),
    ],
)
def test_placeholders(text, found):
    if found is None:
        found = ["{0}", "{name}", "{n, plural, other}", "{{x}}", "${y}"]
    assert markup.placeholders(text) == found


@pytest.mark.parametrize(
    ("policy", "source", "target", "is_dropped"),
    [
        ("keep", "%s", "", False),
        ("drop", "%s", "%s", True),
        ("drop", "a", "b", False),
        ("equal", "%1$s %2$d", "%d %s", False),
        ("equal", "%s %s", "%s", True),
        ("equal", "a", "{name}", True),
    ],
)
def test_policies(policy, source, target, is_dropped):
    decided = Policy(markup.PLACEHOLDERS, policy)
    assert (decided.is_on and bool(decided(source, target))) == is_dropped


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match="markup is 'drops'; expected 'keep', 'drop' or 'equal'"):
        Cleaner.params().set(markup="drops")
