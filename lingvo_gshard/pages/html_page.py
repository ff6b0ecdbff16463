"""HTML pages of one file: style, scripts and data are inside, and nothing else may be loaded."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import re
from collections.abc import Mapping, Sequence

import msgspec

# A file of a package: the package and the name of the file.
File = tuple[str, str]


def make(
    title: str, styles: Sequence[File], scripts: Sequence[File], data: Mapping[str, object]
) -> str:
    """Returns a page that draws data by scripts.

    Args:
      title: title of the page.
      styles: the style sheets.
      scripts: the scripts, which share one scope. A script uses only earlier scripts.
      data: what the element with the id "data" holds as JSON.
    """
    style = join_styles(styles)
    script = join_scripts(scripts)
    policy = (
        f"default-src 'none'; img-src data:; style-src {source_expression(style)}; "
        f"script-src {source_expression(script)}"
    )
    filled = {
        "POLICY": policy,
        "TITLE": html.escape(title),
        "STYLE": style,
        "DATA": embedded(data),
        "SCRIPT": script,
    }
    return fill(read("lingvo_gshard.pages", "page.html"), filled)


def read(package: str, name: str) -> str:
    """Returns the text of a file in a package."""
    return (importlib.resources.files(package) / name).read_text(encoding="utf-8")


def join_styles(files: Sequence[File]) -> str:
    """Joins style sheets to one. If rules conflict, the rule of the last file applies."""
    return "\n".join(read(*file) for file in files)


def join_scripts(files: Sequence[File]) -> str:
    """Joins scripts to one script with a scope of its own. A script uses only earlier scripts."""
    body = "\n".join(read(*file) for file in files)
    return f'(() => {{\n"use strict";\n{body}\n}})();'


def embedded(value: object) -> str:
    """Returns JSON for a script element, escaped so that no text in it can end the element."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def source_expression(text: str) -> str:
    """Returns the content security policy's source expression that allows exactly this text."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def fill(template: str, values: Mapping[str, str]) -> str:
    """Returns a template with each {{NAME}} replaced by its value."""
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: values[match[1]], template)
