"""HTML pages of one file: style, scripts and data are inside, and nothing else may be loaded."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from lingvo_gshard.core import UserError
from lingvo_gshard.sharding import REPLICATED, Mesh

# A file of a package: the package and the name of the file.
File = tuple[str, str]


def make(
    title: str, styles: Sequence[File], scripts: Sequence[File], data: Mapping[str, object]
) -> str:
    """Returns a page that draws data by scripts.

    Args:
      scripts: the scripts, which share one scope. A script uses only earlier scripts.
      data: what the element with the id "data" holds as JSON.
    """
    script = join_scripts(scripts)
    heading = f"<h1>{html.escape(title)}</h1>"
    body = (
        f'<main id="page">{heading}<noscript><p>This page is drawn by a script that stands in the '
        "file itself; it loads nothing.</p></noscript></main>\n"
        f'<script type="application/json" id="data">{embedded(data)}</script>\n'
        f"<script>{script}</script>"
    )
    return page(title, join_styles(styles), body, f"; script-src {source_expression(script)}")


def page(title: str, style: str, body: str, policy: str = "") -> str:
    """Returns a page that loads nothing. `policy` adds to its content security policy."""
    own = f"default-src 'none'; img-src data:; style-src {source_expression(style)}{policy}"
    filled = {"POLICY": own, "TITLE": html.escape(title), "STYLE": style, "BODY": body}
    return fill(read("lingvo_gshard.wings.pages", "page.html"), filled)


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


# Two notations: `E->data; H->model` as in strategies, and `E over data (8), H over model (2)`.
_ARROW = re.compile(r"[;,+\s]+")
_OVER = re.compile(r"(\w) over ([\w]+(?: and [\w]+)*) \([\d x]+\)")
_REPLICATED = ("", "none", REPLICATED)


class ShardedTensor(Protocol):
    """A tensor with letters for its dimensions, and its sharding as text."""

    @property
    def layout(self) -> str: ...

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def split(self) -> str: ...


def describe(mesh: str, devices: int, tensors: Sequence[ShardedTensor]) -> dict[str, object]:
    """Returns the mesh and the sharding of each tensor.

    Args:
      mesh: axes and sizes, such as `data=4,model=2`; "" for one axis of all devices.

    Returns:
      "axes": (name, size) of each mesh axis.
      "splits": for each tensor, the axes of each dimension, major axis first; or, if the sharding
        cannot be drawn, the reason as text.

    Raises:
      UserError: names the mesh if it does not have this number of devices.
    """
    axes = parse_mesh(mesh, devices)
    sizes = dict(axes)
    return {"axes": axes, "splits": [_dimensions(row, sizes) for row in tensors]}


def parse_mesh(mesh: str, devices: int) -> list[tuple[str, int]]:
    """Returns (name, size) of each axis in `data=4,model=2`.

    An empty mesh is one axis of all devices.
    """
    if not mesh.strip():
        return [("devices", devices)]
    found = Mesh.parse(mesh)
    if found.size != devices:
        raise UserError(f"mesh {mesh!r} does not have {devices} devices")
    return list(found.axes)


def parse(text: str, axes: dict[str, int]) -> dict[str, list[str]]:
    """Returns the axes that each letter is split over.

    Args:
      text: a sharding such as `E->data; H->model` or `E over data (8)`.

    Raises:
      UserError: if the text is in neither notation or names an unknown axis.
    """
    if text.strip() in _REPLICATED:
        return {}
    if "->" in text:
        return _parse_arrows(text, axes)
    found = {letter: names.split(" and ") for letter, names in _OVER.findall(text)}
    unknown = [name for names in found.values() for name in names if name not in axes]
    if not found or unknown:
        raise UserError(f"split {text!r} on axes {', '.join(axes)} cannot be read")
    return found


def _parse_arrows(text: str, axes: dict[str, int]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    waiting: list[str] = []
    current: list[str] = []
    for token in filter(None, _ARROW.split(text.replace(" ->", "->").replace("-> ", "->"))):
        letter, arrow, axis = token.partition("->")
        if arrow:
            current = [letter for letter in (*waiting, letter) if letter]
            waiting = []
            found.update({letter: [] for letter in current})
        elif not (current and token in axes):
            waiting.append(token)
            continue
        axis = axis if arrow else token
        if axis == "none":
            continue
        if axis not in axes:
            raise UserError(f"split {text!r} names axis {axis!r}; the axes are {', '.join(axes)}")
        for name in current:
            found[name].append(axis)
    if waiting:
        raise UserError(f"split {text!r} on axes {', '.join(axes)} cannot be read")
    return found


def _dimensions(row: ShardedTensor, sizes: dict[str, int]) -> list[list[str]] | str:
    """Returns the axes of each dimension, or why the sharding cannot be drawn."""
    layout, shape = row.layout, row.shape
    try:
        by_letter = parse(row.split, sizes)
    except ValueError as error:
        return str(error)
    if not by_letter:
        return [[] for _ in shape]
    if len(layout) != len(shape) or not set(by_letter) <= set(layout):
        return f"split {row.split!r} does not fit layout {layout!r} of {len(shape)} dimensions"
    return [by_letter.get(letter, []) for letter in layout]
