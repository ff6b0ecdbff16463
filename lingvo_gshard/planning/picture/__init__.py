"""Draws a plan as a self-contained HTML page: charts, a time line and every tensor on the mesh."""

from __future__ import annotations

import html
import pathlib

import msgspec

from lingvo_gshard.planning.picture import html_page, splits
from lingvo_gshard.planning.plan.plan import Plan

# In order: each script uses only those before it.
_SCRIPTS = (
    "units.js",
    "dom.js",
    "table.js",
    "bars.js",
    "time_line.js",
    "mesh.js",
    "sections.js",
    "main.js",
)


def write(plan: Plan, path: str | pathlib.Path) -> None:
    """Writes the page of a plan to a file.

    Raises:
      ValueError: names --html if `path` cannot be written.
    """
    page = to_html(plan)
    try:
        pathlib.Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--html={path}: cannot be written: {error.strerror}") from error


def to_html(plan: Plan) -> str:
    """Returns the page of a plan as text.

    Raises:
      ValueError: if the plan's mesh does not have as many devices as the plan.
    """
    style = html_page.read(__package__, "style.css")
    script = html_page.join_scripts(__package__, _SCRIPTS)
    policy = (
        f"default-src 'none'; img-src data:; style-src {html_page.source_expression(style)}; "
        f"script-src {html_page.source_expression(script)}"
    )
    filled = {
        "POLICY": policy,
        "TITLE": html.escape(f"{plan.name} on {plan.topology}"),
        "STYLE": style,
        "PLAN": _embedded({"plan": plan, "mesh": splits.describe(plan)}),
        "SCRIPT": script,
    }
    return html_page.fill(html_page.read(__package__, "page.html"), filled)


def _embedded(value: object) -> str:
    """Returns JSON for a script element, escaped so that no text in it can end the element."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
