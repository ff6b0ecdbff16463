"""Draws a plan as a self-contained HTML page: charts, a time line and every tensor on the mesh."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import pathlib
import re

import msgspec

from lingvo_gshard.planning.picture import splits
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
    style, script = _file("style.css"), _script()
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; "
        f"script-src {_digest(script)}"
    )
    filled = {
        "POLICY": policy,
        "TITLE": html.escape(f"{plan.name} on {plan.topology}"),
        "STYLE": style,
        "PLAN": _embedded({"plan": plan, "mesh": splits.describe(plan)}),
        "SCRIPT": script,
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: filled[match[1]], _file("page.html"))


def _embedded(value: object) -> str:
    """Returns JSON for a script element, escaped so that no text in it can end the element."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _script() -> str:
    body = "\n".join(_file(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}\n}})();'


def _digest(text: str) -> str:
    """Returns the content security policy's source expression that allows exactly this text."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _file(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")
