"""HTML pages of one file: style and scripts are inside, and nothing else may run."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Mapping, Sequence


def read(package: str, name: str) -> str:
    """Returns the text of a file in a package."""
    return (importlib.resources.files(package) / name).read_text(encoding="utf-8")


def join_scripts(package: str, names: Sequence[str]) -> str:
    """Returns scripts of a package as one, in a scope of its own.

    Args:
      package: the package.
      names: the files. Each uses only those before it.
    """
    body = "\n".join(read(package, name) for name in names)
    return f'(() => {{\n"use strict";\n{body}\n}})();'


def source_expression(text: str) -> str:
    """Returns the content security policy's source expression that allows exactly this text."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def fill(template: str, values: Mapping[str, str]) -> str:
    """Returns a template with each {{NAME}} replaced by its value."""
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: values[match[1]], template)
