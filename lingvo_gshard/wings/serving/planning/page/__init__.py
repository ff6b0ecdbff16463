"""The planning page: one HTML file with a form, and a page that compares plans."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from lingvo_gshard.wings.pages import html_page
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.serving.page import filled

_PAGES, _HERE = "lingvo_gshard.wings.pages", "lingvo_gshard.wings.serving.planning.page"
_STYLES = ((_PAGES, "reset.css"), (_PAGES, "base.css"), (_HERE, "style.css"))
# In order: a script uses only earlier scripts.
_COMPARISON = ((_PAGES, "units.js"), (_PAGES, "dom.js"), (_HERE, "compare.js"))
_FORM = (*_COMPARISON, (_HERE, "server.js"), (_HERE, "form.js"), (_HERE, "main.js"))


@functools.cache
def to_html() -> tuple[str, str]:
    """Returns the page, and the content security policy that lets it run nothing else."""
    return filled(_HERE, _STYLES, _FORM)


def comparison_to_html(plans: Sequence[Plan], names: Sequence[str]) -> str:
    """Returns a page of its own that shows plans side by side."""
    title = f"{len(plans)} plans of {', '.join(dict.fromkeys(names))}"
    scripts = (*_COMPARISON, (_HERE, "saved.js"))
    return html_page.make(title, _STYLES, scripts, {"plans": list(plans), "names": list(names)})
