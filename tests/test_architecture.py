"""The house's own rules: which room may know which, one name per install, nothing overgrown."""

import ast
import functools
import importlib.metadata
import pathlib
import re

import pytest
from setuptools import find_packages

from lingvo_gshard.core.letters import LETTERS, is_local

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "lingvo_gshard"
PRIVATE_XLA_MODULE = "tensorflow.python.compiler.xla.experimental.xla_sharding"

# The position of the layout, or of the equation, among the arguments of a call.
LAYOUT_ARGUMENTS = {"einsum": 0, "annotate": 1, "create_variable": 1, "axes_of": 0}

LONGEST_FILE = 450
LONGEST_FUNCTION = 70

# Each room with those it may import; what is not here it may not.
MODEL = ("core", "data", "sharding", "layers", "decoding", "tasks")
ROOMS = {
    "core": (),
    "data": ("core",),
    "sharding": ("core",),
    "layers": ("core", "sharding"),
    "decoding": ("core", "data", "sharding", "layers"),
    "tasks": MODEL[:5],
    "training": MODEL,
    "hlo": (*MODEL, "training"),
    "runtime": (*MODEL, "training", "hlo"),
    "planning": (*MODEL, "training", "hlo", "runtime"),
    "params": (*MODEL, "training"),
    "api": (*MODEL, "training", "hlo", "runtime", "planning", "params"),
    "tools": (*MODEL, "training", "hlo", "runtime", "planning", "params", "api"),
}


def _sources(*folders: str) -> list[pathlib.Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _imported(tree: ast.Module) -> set[str]:
    """Dotted names that a file imports, with those it takes from a module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _room(path: pathlib.Path) -> str | None:
    """The room of a file of the package; None for the package's own __init__."""
    parts = path.relative_to(ROOT / PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def _rooms_known(path: pathlib.Path) -> set[str]:
    prefix = PACKAGE + "."
    names = [name for name in _imported(_tree(path)) if name.startswith(prefix)]
    return {name.removeprefix(prefix).split(".")[0] for name in names} & set(ROOMS)


def test_every_folder_of_the_package_is_a_room():
    folders = {_room(path) for path in _sources(PACKAGE)} - {None}
    assert folders <= set(ROOMS)
    without_init = [f for f in folders if not (ROOT / PACKAGE / f / "__init__.py").exists()]
    assert not without_init


def test_dependence_goes_one_way():
    breaches = [
        f"{path.relative_to(ROOT)} imports {known}"
        for path in _sources(PACKAGE)
        if (room := _room(path))
        for known in sorted(_rooms_known(path) - {room} - set(ROOMS[room]))
    ]
    assert not breaches, breaches


def test_the_rooms_form_no_circle():
    order = list(ROOMS)
    for index, room in enumerate(order):
        assert set(ROOMS[room]) <= set(order[:index]), room


def test_imports_are_absolute():
    relative = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _sources(PACKAGE, "tests")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, relative


def test_the_package_never_imports_its_tests():
    importing = [
        str(path.relative_to(ROOT))
        for path in _sources(PACKAGE)
        if any(name.split(".")[0] == "tests" for name in _imported(_tree(path)))
    ]
    assert not importing, importing


def test_only_command_lines_have_flags():
    """Below tools everything takes arguments, so that a notebook can call it."""
    importing = [
        str(path.relative_to(ROOT))
        for path in _sources(PACKAGE)
        if _room(path) != "tools"
        for name in _imported(_tree(path))
        if name.startswith("absl") and not name.startswith("absl.logging")
    ]
    assert not importing, importing


def test_tensorflows_private_sharding_module_is_imported_in_one_place():
    importing = [
        str(path.relative_to(ROOT))
        for path in _sources(PACKAGE, "tests")
        if any(name.startswith(PRIVATE_XLA_MODULE) for name in _imported(_tree(path)))
    ]
    assert len(importing) <= 1, importing


def _layouts(tree: ast.Module) -> set[str]:
    """Layouts that a file writes as literals of its calls, and the suffixes of its names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            name = getattr(function, "id", function)
            position = LAYOUT_ARGUMENTS.get(name, len(node.args))
            for argument in node.args[position : position + 1]:
                value = getattr(argument, "value", None)
                if isinstance(value, str) and "..." not in value:
                    found.update(re.split(",|->", value))
        name = getattr(node, "id", getattr(node, "arg", getattr(node, "attr", None)))
        if isinstance(name, str) and re.fullmatch(r"_?[a-z]\w*_[A-Za-z0-9]*[A-Z]\w*", name):
            found.add(re.sub("[0-9]", "", name.rpartition("_")[2]))
    return found


def _local_letters(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if getattr(target, "id", "") == "LOCAL_LETTERS":
                return {key.value for key in node.value.keys}
    return set()


def test_letters_of_layouts_are_in_the_table_or_declared_by_their_file():
    unknown = [
        f"{path.relative_to(ROOT)}: {letter!r} of {layout!r}"
        for path in _sources(PACKAGE)
        for layout in sorted(_layouts(_tree(path)))
        for letter in sorted(set(layout) - set(LETTERS) - _local_letters(_tree(path)))
    ]
    assert not unknown, unknown
    shared = [p for p in _sources(PACKAGE) if not all(map(is_local, _local_letters(_tree(p))))]
    assert not shared, shared


def _reads(tree: ast.Module, name: str) -> bool:
    return any(name in (getattr(n, "id", ""), getattr(n, "attr", "")) for n in ast.walk(tree))


def test_ambient_state_is_defined_in_one_place():
    core = ROOT / PACKAGE / "core" / "scopes.py"
    holding = {path for path in _sources(PACKAGE) if _reads(_tree(path), "ContextVar")}
    assert holding == {core}, holding
    scoping = {
        str(p.relative_to(ROOT / PACKAGE)) for p in _sources(PACKAGE) if _reads(_tree(p), "Scope")
    }
    assert scoping <= {"core/scopes.py", "core/context.py", "sharding/scope.py"}, scoping


def test_files_and_functions_keep_the_measure():
    overgrown = []
    for path in _sources(PACKAGE, "tests"):
        name = path.relative_to(ROOT)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LONGEST_FILE:
            overgrown.append(f"{name}: {lines} lines")
        for node in ast.walk(_tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    overgrown.append(f"{name}: {node.name} has {length} lines")
    assert not overgrown, overgrown


def test_every_module_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in _sources(PACKAGE, "tests")
        if not ast.get_docstring(_tree(path))
    ]
    assert not silent, silent


def test_an_install_adds_one_name():
    packages = find_packages(str(ROOT), include=[PACKAGE, f"{PACKAGE}.*"])
    on_disk = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in _sources(PACKAGE)
        if path.name == "__init__.py"
    }
    assert set(packages) == on_disk
    try:
        installed = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed here")
    assert installed.read_text("top_level.txt").split() == [PACKAGE]


def test_a_command_is_a_module_of_tools_and_a_name_in_setup():
    """Two files make a command; the launcher finds the module by the script's name."""
    setup = _tree(ROOT / "setup.py")
    (commands,) = (
        ast.literal_eval(node.value)
        for node in setup.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "TOOLS"
    )
    tools = {path.stem: path for path in (ROOT / PACKAGE / "tools").glob("[a-z]*.py")}
    assert sorted(commands) == sorted(tools)
    for path in tools.values():
        functions = [n.name for n in _tree(path).body if isinstance(n, ast.FunctionDef)]
        assert "main" in functions, path.name


def test_constraints_pin_what_is_required():
    pins = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {name.lower().replace("_", "-") for name in pins}
    quoted = re.findall(r'"([a-z][\w-]+)[>=~]=', (ROOT / "setup.py").read_text())
    required = {name.lower() for name in quoted}
    assert len(required) > 15 and required <= pinned, required - pinned
