"""The page on which a person tries the model: one HTML file with its style and its scripts."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re

# In order: each script uses only those before it.
_SCRIPTS = ("dom.js", "server.js", "tokens.js", "experts.js", "answers.js", "main.js")


def to_html() -> tuple[str, str]:
    """Returns the page, and the content security policy that lets it run nothing else."""
    style, script = _file("style.css"), _script()
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src {_digest(style)}; "
        f"script-src {_digest(script)}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    filled = {"STYLE": style, "SCRIPT": script}
    text = re.sub(r"\{\{([A-Z]+)\}\}", lambda match: filled[match[1]], _file("page.html"))
    return text, policy


def _script() -> str:
    body = "\n".join(_file(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}\n}})();'


def _digest(text: str) -> str:
    """Returns the content security policy's source expression that allows exactly this text."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _file(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")
