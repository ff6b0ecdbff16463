"""The planning page: one HTML file with a form, and a page that compares plans."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.pages import html_page
from lingvo_gshard.planning.plan.plan import Plan

_PAGES, _HERE = "lingvo_gshard.pages", "lingvo_gshard.serving.planning.page"
_STYLES = ((_PAGES, "reset.css"), (_PAGES, "base.css"), (_HERE, "style.css"))
# In order: a script uses only earlier scripts.
_COMPARISON = ((_PAGES, "units.js"), (_PAGES, "dom.js"), (_HERE, "compare.js"))
_FORM = (*_COMPARISON, (_HERE, "server.js"), (_HERE, "form.js"), (_HERE, "main.js"))


def to_html() -> tuple[str, str]:
    """Returns the page, and the content security policy that lets it run nothing else."""
    style, script = html_page.join_styles(_STYLES), html_page.join_scripts(_FORM)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; "
        f"style-src {html_page.source_expression(style)}; "
        f"script-src {html_page.source_expression(script)}; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    template = html_page.read(_HERE, "page.html")
    return html_page.fill(template, {"STYLE": style, "SCRIPT": script}), policy


def comparison_to_html(plans: Sequence[Plan], names: Sequence[str]) -> str:
    """Returns a page of its own that shows plans side by side.

    Args:
      plans: the plans.
      names: the name of each plan's model.
    """
    title = f"{len(plans)} plans of {', '.join(dict.fromkeys(names))}"
    scripts = (*_COMPARISON, (_HERE, "saved.js"))
    return html_page.make(title, _STYLES, scripts, {"plans": list(plans), "names": list(names)})
