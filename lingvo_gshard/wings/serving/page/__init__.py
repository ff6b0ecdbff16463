"""The page for trying the model by hand: one HTML file that contains its style and scripts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from starlette.responses import HTMLResponse, Response

from lingvo_gshard.wings.pages import html_page

_HERE = "lingvo_gshard.wings.serving.page"
# In order: a script uses only earlier scripts.
_SCRIPTS = (
    ("lingvo_gshard.wings.pages", "dom.js"),
    *((_HERE, f"{name}.js") for name in ("words", "server", "tokens", "experts")),
    *((_HERE, f"{name}.js") for name in ("examples", "answers", "chat", "main")),
)
_STYLES = (("lingvo_gshard.wings.pages", "reset.css"), (_HERE, "style.css"))


@functools.cache
def to_html() -> tuple[str, str]:
    """Returns the page, and the content security policy that lets it run nothing else."""
    return filled(_HERE, _STYLES, _SCRIPTS)


def response(page: tuple[str, str]) -> Response:
    """Returns a page and its content security policy as an HTTP response."""
    return HTMLResponse(page[0], headers={"Content-Security-Policy": page[1]})


def filled(
    package: str, styles: Sequence[html_page.File], scripts: Sequence[html_page.File]
) -> tuple[str, str]:
    """Returns a page that asks its server, and the policy that lets it run nothing else."""
    style, script = html_page.join_styles(styles), html_page.join_scripts(scripts)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; "
        f"style-src {html_page.source_expression(style)}; "
        f"script-src {html_page.source_expression(script)}; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    template = html_page.read(package, "page.html")
    return html_page.fill(template, {"STYLE": style, "SCRIPT": script}), policy
