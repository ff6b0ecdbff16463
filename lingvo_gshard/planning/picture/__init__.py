"""The picture of a plan: one HTML file, to look at rather than read, with nothing beside it."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import pathlib
import re
from typing import Any

from lingvo_gshard.planning.picture import splits
from lingvo_gshard.planning.plan import file as plan_file

# In this order: each knows only what stands before it.
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


def write(plan: dict[str, Any], path: str | pathlib.Path) -> None:
    """Writes the picture of a plan, as `Plan.to_json` gives it, to an HTML file.

    Raises ValueError naming the field if it is no plan, and --html if `path` cannot be written.
    """
    page = to_html(plan)
    try:
        pathlib.Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--html={path}: cannot be written: {error.strerror}") from error


def to_html(plan: dict[str, Any]) -> str:
    """Returns the picture of a plan as text; ValueError naming the field if it is no plan."""
    name = str(plan.get("name", "")) if isinstance(plan, dict) else ""
    plan_file.check(plan, f"plan {name}")
    style, script = _file("style.css"), _script()
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; "
        f"script-src {_digest(script)}"
    )
    filled = {
        "POLICY": policy,
        "TITLE": html.escape(f"{plan['name']} on {plan['topology']}"),
        "STYLE": style,
        "PLAN": _embedded({"plan": plan, "mesh": splits.describe(plan)}),
        "SCRIPT": script,
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: filled[match[1]], _file("page.html"))


def _embedded(value: Any) -> str:
    """JSON that may stand in a script element: no text in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _script() -> str:
    body = "\n".join(_file(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}\n}})();'


def _digest(text: str) -> str:
    """The source by which a content security policy allows this text, and no other, to run."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _file(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")
