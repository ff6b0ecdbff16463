"""The page for trying the model by hand: one HTML file that contains its style and scripts."""

from __future__ import annotations

from lingvo_gshard.pages import html_page

_HERE = "lingvo_gshard.serving.page"
# In order: a script uses only earlier scripts.
_SCRIPTS = (
    ("lingvo_gshard.pages", "dom.js"),
    *((_HERE, f"{name}.js") for name in ("words", "server", "tokens", "experts")),
    *((_HERE, f"{name}.js") for name in ("examples", "answers", "main")),
)
_STYLES = (("lingvo_gshard.pages", "reset.css"), (_HERE, "style.css"))


def to_html() -> tuple[str, str]:
    """Returns the page, and the content security policy that lets it run nothing else."""
    style = html_page.join_styles(_STYLES)
    script = html_page.join_scripts(_SCRIPTS)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; "
        f"style-src {html_page.source_expression(style)}; "
        f"script-src {html_page.source_expression(script)}; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    template = html_page.read(_HERE, "page.html")
    return html_page.fill(template, {"STYLE": style, "SCRIPT": script}), policy
