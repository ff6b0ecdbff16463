# tests: /docs/install.md, /docs/coming_from.md, /setup.py
"""Tests that the pages on installing and on coming from other libraries name what there is."""

import contextlib
import functools
import importlib
import pathlib
import pkgutil
import re
from unittest import mock

import pytest

from lingvo_gshard.core import registry
from lingvo_gshard.sharding.strategies import base_names
from lingvo_gshard.tools.console import launcher

ROOT = pathlib.Path(__file__).resolve().parents[1]
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
COMING = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")


@functools.cache
def _setup() -> dict:
    """Returns the arguments that setup.py gives to setuptools."""
    with mock.patch("setuptools.setup") as setup:
        code = (ROOT / "setup.py").read_text(encoding="utf-8")
        exec(compile(code, str(ROOT / "setup.py"), "exec"), {"__file__": str(ROOT / "setup.py")})
    return setup.call_args.kwargs


def test_the_table_has_each_extra_once():
    table = INSTALL.partition("## Extras")[2].partition("## ")[0]
    named = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert named == sorted(_setup()["extras_require"])


def test_the_page_has_the_versions_of_python():
    prefix = "Programming Language :: Python :: "
    versions = [c.removeprefix(prefix) for c in _setup()["classifiers"] if c.startswith(prefix)]
    assert f"| Python | {', '.join(versions)} |" in INSTALL


def test_extras_that_commands_name_exist():
    for extras in re.findall(r"(?:lingvo_gshard|'\.|\.whl)\[([\w,-]+)\]", INSTALL):
        assert set(extras.split(",")) <= set(_setup()["extras_require"])


@functools.cache
def _paths() -> frozenset[str]:
    trees = map(registry.get, ("translation.quickstart", "language_model.quickstart"))
    return frozenset(
        f"{path}.{name}".lstrip(".")
        for tree in trees
        for path, node in tree.nodes()
        for name, _ in node.items()
    )


@functools.cache
def _flags() -> frozenset[str]:
    modules = (importlib.import_module(f"lingvo_gshard.tools.{t}") for t in launcher.tool_names())
    return frozenset(f for m in modules if hasattr(m, "define_flags") for f in m.define_flags())


def _exists(name: str) -> bool:
    """Returns whether a path, flag, command, strategy or object of Python exists."""
    flag = re.match(r"--(\w+)=?(.*)", name)
    if flag:
        strategies = flag[2].split("_") if flag[1] == "strategy" and flag[2] else []
        return flag[1] in _flags() and set(strategies) <= set(base_names())
    if name.startswith("gshard-"):
        return name.removeprefix("gshard-") in launcher.tool_names()
    if name.startswith("lingvo_gshard."):
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            return bool(pkgutil.resolve_name(name))
        return False
    return name in _paths()


_OURS = re.compile(
    r"`(--\w+(?:=[\w=,]+)?|gshard-\w+|lingvo_gshard\.[\w.]+|(?:task|input|step|run|sharding)\.[\w.]+)`"
)


def _rows() -> list[str]:
    rows = re.findall(r"^\| .+? \| (.+) \|$", COMING, re.MULTILINE)
    return [row for row in rows if row not in ("here", "---")]


@pytest.mark.parametrize("name", sorted({name for row in _rows() for name in _OURS.findall(row)}))
def test_each_of_our_options_exists(name):
    assert _exists(name)


def test_most_rows_name_an_option_of_ours():
    assert len(_rows()) > 100
    assert sum(bool(_OURS.search(row)) for row in _rows()) > 0.7 * len(_rows())


def test_an_option_that_does_not_exist_is_found():
    for name in ("step.clip_nrom", "--stratgy=expert", "--strategy=tensr", "gshard-trian"):
        assert not _exists(name)


def test_readers_of_gshard_find_their_words():
    for page in ("README.md", "docs/strategies.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "xla_sharding" in text and "TPUStrategy" in text
