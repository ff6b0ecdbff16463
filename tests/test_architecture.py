# tests: /lingvo_gshard/, /tests/, /benchmarks/, /studies/, /setup.py, /constraints.txt
"""Tests rules of the code base: imports, file sizes, ambient state, and packaging."""

import ast
import collections
import functools
import graphlib
import importlib
import importlib.metadata
import pathlib
import re
import subprocess
import sys

import pytest
from setuptools import find_packages

from docs.size.house import WINGS, House
from lingvo_gshard.core.letters import LETTERS, is_local

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "lingvo_gshard"
EVERYTHING = (PACKAGE, "tests", "benchmarks", "studies")
PRIVATE_XLA_MODULE = "tensorflow.python.compiler.xla.experimental.xla_sharding"

# The position of the layout or equation argument of each function.
LAYOUT_ARGUMENTS = {"einsum": 0, "annotate": 1, "create_variable": 1, "axes_of": 0}

LONGEST_FILE = 600
LONGEST_FUNCTION = 60
LARGEST_FOLDER = 25

# The line between the heart of the package and its wings (docs/wings.txt). These numbers shrink.
MOST_LINES_OF_THE_HEART = 26_350
MOST_FILES_OF_THE_HEART = 192

# Folders in the order of dependence, each with the folders it may import.
MODEL = ("core", "data", "sharding", "layers", "tasks")
HEART = {
    "core": (),
    "data": ("core",),
    "sharding": ("core",),
    "layers": ("core", "sharding"),
    "tasks": MODEL[:4],
    "training": MODEL,
    "runtime": (*MODEL, "training"),
    "params": (*MODEL, "training"),
}
# Wings may import the heart, and the other wings that are named.
WINGS_OF = {
    "cluster": (),
    "compiler_options": (),
    "functions": (),
    "saved_programs": (),
    "kernels": (),
    "preparation": (),
    "earlier_versions": (),
    "evaluation": (),
    "gin": (),
    "hlo": (),
    "repeat": (),
    "optimizers": (),
    "pages": (),
    "tracing": (),
    "spmd_passes": (),
    "pipeline": ("repeat",),
    "dropless": ("kernels",),
    "long_inputs": ("kernels",),
    "fine_tuning": ("preparation",),
    "local_updates": ("optimizers",),
    "low_precision": ("kernels", "pipeline"),
    "propagation": ("hlo", "pipeline", "tracing"),
    "services": ("cluster", "optimizers", "tracing"),
    "object_stores": ("services",),
    "inference": ("kernels", "preparation", "dropless"),
    "facts": ("fine_tuning",),
    "verification": ("functions", "hlo", "optimizers", "tracing", "local_updates"),
    "agents": ("cluster", "object_stores", "services"),
    "export": ("object_stores", "preparation", "inference"),
    "planning": (
        *("cluster", "compiler_options", "functions", "gin", "hlo", "pages", "repeat", "tracing"),
        *("dropless", "kernels", "spmd_passes", "services", "inference", "facts"),
    ),
    "published_layers": ("inference", "facts"),
    "testing": ("functions", "hlo", "inference", "verification"),
    "keras": ("verification", "planning"),
    "profiling": ("hlo", "tracing", "services", "facts", "planning"),
    "giants": ("preparation", "repeat", "dropless", "published_layers"),
    "open_models": (
        "object_stores",
        "preparation",
        "repeat",
        "dropless",
        "fine_tuning",
        "published_layers",
    ),
    "reporting": ("pages", "services", "profiling"),
}
ALL_BELOW_API = (*HEART, *(wing for wing in WINGS_OF if wing not in ("agents", "keras", "testing")))
FOLDERS = {
    **HEART,
    **{wing: (*HEART, *others) for wing, others in WINGS_OF.items()},
    "api": ALL_BELOW_API,
    "serving": (*ALL_BELOW_API, "api"),
    "tools": (*ALL_BELOW_API, "agents", "api", "serving"),
}


def _sources(*folders: str) -> list[pathlib.Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _imported(tree: ast.Module) -> set[str]:
    """Returns the dotted names of modules, and of names within modules, that a file imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _folder(path: pathlib.Path) -> str | None:
    """Returns a file's folder in the package or in wings/; None for the files of these two."""
    parts = path.relative_to(ROOT / PACKAGE).parts
    parts = parts[1:] if parts[0] == "wings" else parts
    return parts[0] if len(parts) > 1 else None


def _place(folder: str) -> pathlib.Path:
    """Returns where a folder of `FOLDERS` stands."""
    wing = ROOT / PACKAGE / "wings" / folder
    return wing if wing.is_dir() else ROOT / PACKAGE / folder


def _imported_folders(path: pathlib.Path) -> set[str]:
    prefix = PACKAGE + "."
    names = [name for name in _imported(_tree(path)) if name.startswith(prefix)]
    inner = [name.removeprefix(prefix).removeprefix("wings.") for name in names]
    return {name.split(".")[0] for name in inner} & set(FOLDERS)


def test_every_folder_is_in_the_dependence_order():
    folders = {_folder(path) for path in _sources(PACKAGE)} - {None}
    assert folders <= set(FOLDERS)
    without_init = [f for f in folders if not (_place(f) / "__init__.py").exists()]
    assert not without_init


def test_folders_import_only_what_the_order_allows():
    breaches = [
        f"{path.relative_to(ROOT)} imports {known}"
        for path in _sources(PACKAGE)
        if (folder := _folder(path))
        for known in sorted(_imported_folders(path) - {folder} - set(FOLDERS[folder]))
    ]
    assert not breaches, breaches


def test_the_dependence_order_has_no_cycle():
    order = list(FOLDERS)
    for index, folder in enumerate(order):
        assert set(FOLDERS[folder]) <= set(order[:index]), folder


@functools.cache
def _house() -> House:
    return House(ROOT / PACKAGE, WINGS.read_text(encoding="utf-8"))


def test_the_heart_imports_no_wing():
    assert not _house().breaches


def test_the_heart_does_not_grow():
    heart = _house().sizes()[0]
    assert heart.lines <= MOST_LINES_OF_THE_HEART and heart.files <= MOST_FILES_OF_THE_HEART


def test_wings_import_public_names_from_public_modules_alone():
    assert not [i for i in _house().taken() if not i.is_public]


def test_public_modules_offer_what_exists_and_nothing_twice():
    offered = {}
    for room in sorted(path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.pyi")):
        public = importlib.import_module(f"{PACKAGE}.{room}")
        assert public.__all__
        for name in public.__all__:
            assert offered.setdefault(name, room) == room, name
            assert getattr(public, name) is not None


# Imports each name, given as folder:name, as if it were the first import of the package.
_IMPORT_FIRST = f"""
import importlib, sys
for given in sys.argv[1:]:
    for module in [module for module in sys.modules if module.startswith("{PACKAGE}")]:
        del sys.modules[module]
    folder, name = given.split(":")
    getattr(importlib.import_module(folder), name)
"""


def test_offered_modules_need_no_other_import():
    """A folder finds a module of its own only if it names it, or if something imported it."""
    offered = [module.split(".") for module, name in _house().offered if not name]
    names = [f"{PACKAGE}.{parts[1]}:{parts[-1]}" for parts in offered]
    assert len(names) > 30
    subprocess.run([sys.executable, "-c", _IMPORT_FIRST, *names], check=True, cwd=ROOT)


def test_seams_are_offered_by_their_names():
    """A feature of anybody's finds its seam in a public module."""
    seams = {
        node.value.args[0].value: node.target.id
        for path in _sources(PACKAGE)
        for node in _tree(path).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "Seam"
    }
    private = {"experiments", "renames", "compiler_options"}
    assert seams.keys() == importlib.import_module(f"{PACKAGE}.features").MODULES.keys()
    assert seams == {name: "_" * (name == "experiments") + name.upper() for name in seams}
    offered = {name for _, name in _house().offered}
    assert {name.upper() for name in seams.keys() - private} <= offered


def test_a_wing_of_the_table_is_a_folder_or_is_about_to_be_one():
    patterns = [line.split(None, 1)[1].strip() for line in WINGS.read_text().splitlines() if line]
    paths = [path.relative_to(ROOT / PACKAGE).as_posix() for path in _sources(PACKAGE)]
    for pattern in (part for line in patterns for part in line.split("|^")):
        assert any(re.search(pattern, path) for path in paths), pattern


def _bazel_dependencies(folder: str) -> set[str]:
    """Returns the folders that a folder's BUILD file declares, with what these declare."""
    build = (_place(folder) / "BUILD").read_text(encoding="utf-8")
    (declared,) = re.findall(r"knows = \[(.*?)\]", build, re.DOTALL) or [""]
    direct = {name.removeprefix("wings/") for name in re.findall(r'"([\w/]+)"', declared)}
    return direct.union(*(_bazel_dependencies(other) for other in direct))


def test_build_files_declare_what_is_imported():
    for folder in FOLDERS:
        paths = _sources(str(_place(folder).relative_to(ROOT)))
        imported = set().union(*map(_imported_folders, paths)) - {folder}
        assert imported <= _bazel_dependencies(folder), folder


def test_the_package_of_bazel_has_every_folder():
    """Expects also what no file imports but seams find by its name."""
    build = (ROOT / PACKAGE / "BUILD").read_text(encoding="utf-8")
    direct = {name.removeprefix("wings/") for name in re.findall(rf'"//{PACKAGE}/([\w/]+)"', build)}
    found = direct.union(*map(_bazel_dependencies, direct))
    assert found == FOLDERS.keys() - {"testing"}


def _module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, modules: set[str]) -> set[str]:
    """Returns the modules of the package that a file imports anywhere."""
    names = _imported(tree)
    return {name if name in modules else name.rpartition(".")[0] for name in names} & modules


def test_module_imports_have_no_cycle():
    """Imports for types alone and imports within functions count as well."""
    # The package's own __init__ imports nothing before a name of the API is used.
    paths = {_module_of(path): path for path in _sources(PACKAGE) if _folder(path)}
    graph = {name: _imports(_tree(path), set(paths)) - {name} for name, path in paths.items()}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_imports_are_absolute():
    relative = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _sources(*EVERYTHING)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, relative


def test_the_package_never_imports_what_is_not_installed():
    beside = {"tests", "benchmarks", "studies", "docs"}
    importing = [
        str(path.relative_to(ROOT))
        for path in _sources(PACKAGE)
        if any(name.split(".")[0] in beside for name in _imported(_tree(path)))
    ]
    assert not importing, importing


def test_a_step_knows_no_run():
    """The training step is pure functions: no monitoring, no checkpoints, no observers."""
    of_runs = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in _sources(f"{PACKAGE}/training/step")
        for name in _imported(_tree(path))
        if name.startswith(f"{PACKAGE}.training.run")
    ]
    assert not of_runs, of_runs


def test_only_tools_define_flags():
    """All other folders take arguments instead of flags, so that notebooks can call them."""
    importing = [
        str(path.relative_to(ROOT))
        for path in _sources(PACKAGE)
        if _folder(path) != "tools"
        for name in _imported(_tree(path))
        if name.startswith("absl") and not name.startswith("absl.logging")
    ]
    assert not importing, importing


def test_only_tools_spell_flags():
    """The library names options; a command spells them (tools/console/spelling.py)."""
    command = re.compile(r"(gshard-\w+|aws s3 cp)[^;.]*")
    spelling = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _sources(PACKAGE)
        if _folder(path) != "tools"
        for node in _texts(_tree(path))
        if re.search(r"(^|[\s(`'])--(?!xla)[a-z{]", command.sub("", _words(node)))
    ]
    assert not spelling, spelling


def test_docstrings_of_the_library_name_options_and_no_flags():
    """Examples of commands may have flags, and so may lines for a gin file."""
    command = re.compile(r"((gshard-|python -m )\w+)([^;.]|[;.](?=\S))*|--gin_param=")
    spelling = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for path in _sources(PACKAGE)
        if _folder(path) != "tools"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if re.search(r"(^|[\s(`'])--(?!xla)[a-z{]", command.sub("", ast.get_docstring(node) or ""))
    ]
    assert not spelling, spelling


def _texts(tree: ast.Module) -> list[ast.expr]:
    """Returns the strings of a file, without its docstrings and without parts of f-strings."""
    docstrings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)]
    parts = [p for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for p in n.values]
    left_out = {id(node) for node in (*docstrings, *parts)}
    texts = (n for n in ast.walk(tree) if isinstance(n, (ast.Constant, ast.JoinedStr)))
    return [n for n in texts if id(n) not in left_out]


def _words(text: ast.expr) -> str:
    """Returns a string without the values that an f-string inserts."""
    if isinstance(text, ast.Constant):
        return text.value if isinstance(text.value, str) else ""
    assert isinstance(text, ast.JoinedStr)
    return "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in text.values)


def test_tensorflows_private_sharding_module_is_imported_in_one_place():
    importing = [
        str(path.relative_to(ROOT))
        for path in _sources(*EVERYTHING)
        if any(name.startswith(PRIVATE_XLA_MODULE) for name in _imported(_tree(path)))
    ]
    assert len(importing) <= 1, importing


def _layouts(tree: ast.Module) -> set[str]:
    """Returns the layouts in a file: literals of calls and suffixes of names."""
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


def test_layouts_use_known_or_locally_declared_letters():
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
    core = ROOT / PACKAGE / "core" / "context.py"
    holding = {path for path in _sources(PACKAGE) if _reads(_tree(path), "ContextVar")}
    assert holding == {core}, holding
    scoping = {
        str(p.relative_to(ROOT / PACKAGE)) for p in _sources(PACKAGE) if _reads(_tree(p), "Scope")
    }
    settings = "wings/planning/compiling/cache.py"
    of_sharding = ("sharding/partitioning.py", "sharding/recording.py")
    allowed = {"core/context.py", "core/kernel_use.py", *of_sharding, settings}
    assert scoping <= allowed, scoping


def test_no_folder_is_too_large():
    counts = collections.Counter(path.parent for path in _sources(*EVERYTHING))
    too_large = {
        str(folder.relative_to(ROOT)): count
        for folder, count in counts.items()
        if count > LARGEST_FOLDER
    }
    assert not too_large, too_large


def test_no_file_or_function_is_too_long():
    too_long = []
    for path in _sources(*EVERYTHING):
        name = path.relative_to(ROOT)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LONGEST_FILE:
            too_long.append(f"{name}: {lines} lines")
        for node in ast.walk(_tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    too_long.append(f"{name}: {node.name} has {length} lines")
    assert not too_long, too_long


def test_a_mark_above_parameters_would_mark_nothing():
    """The cases that absl makes of a test carry the marks of the test, and no later ones."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names = [ast.unparse(each) for each in node.decorator_list]
                marked = [i for i, name in enumerate(names) if name.startswith("pytest.mark")]
                made = [i for i, name in enumerate(names) if name.startswith("parameterized")]
                if marked and made and marked[0] < made[-1]:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not found, found


def test_every_module_has_a_docstring():
    undocumented = [
        str(path.relative_to(ROOT))
        for path in _sources(*EVERYTHING)
        if not ast.get_docstring(_tree(path))
    ]
    assert not undocumented, undocumented


def test_the_package_installs_one_top_level_name():
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


def test_every_command_is_a_module_or_package_of_tools_and_an_entry_point():
    """The launcher finds the module of a command by the name of the console script."""
    setup = _tree(ROOT / "setup.py")
    (commands,) = (
        ast.literal_eval(node.value)
        for node in setup.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "TOOLS"
    )
    folder = ROOT / PACKAGE / "tools"
    tools = {path.stem: path for path in folder.glob("[a-z]*.py")}
    packages = {path.parent.name: path for path in folder.glob("[a-z]*/__init__.py")}
    tools |= {name: path for name, path in packages.items() if _has_main(path)}
    assert sorted(commands) == sorted(tools)
    for path in tools.values():
        assert _has_main(path), path.name


def _has_main(path: pathlib.Path) -> bool:
    return any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in _tree(path).body)


def test_constraints_pin_every_requirement():
    pins = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {name.lower().replace("_", "-") for name in pins}
    quoted = re.findall(r'"([a-z][\w-]+)[>=~]=', (ROOT / "setup.py").read_text())
    required = {name.lower() for name in quoted}
    assert len(required) > 15 and required <= pinned, required - pinned


def test_files_of_others_are_opened_in_one_place():
    """core/files refuses pipes and devices. The files below are listed with what they open."""
    opens = re.compile(
        r"\.read_bytes\(\)|\.read_text\((?!\w+\)$)|(?<![\w.])open\([^)]*\"rb\"|\.open\(\"rb\"|memmap\("
    )
    own = {
        # Linux, Python and this package.
        *("wings/agents/worker.py", "wings/services/memory.py", "wings/services/run_lock.py"),
        *("wings/services/run_records.py", "tools/diagnosis/speed.py", "wings/pages/html_page.py"),
        *("tools/diagnosis/environment.py", "tools/console/libraries.py"),
        "tools/console/launcher.py",
        # Caches, work folders and shared memory that the same user has written.
        *("wings/propagation/propagated.py", "wings/inference/programs/startup_cache.py"),
        *("wings/preparation/duplicates.py", "wings/preparation/job.py", "tools/launch/slurm.py"),
        *("wings/preparation/row_files.py", "wings/object_stores/synced_folder.py"),
        "wings/services/snapshots.py",
        *("wings/agents/keeper.py", "wings/agents/health.py", "wings/serving/planning/process.py"),
        # Streams, which may be pipes.
        *("tools/serve.py", "tools/console/line_command.py"),
        # A file whose header was read before.
        "wings/open_models/shards.py",
    }
    package = ROOT / PACKAGE
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if package / "core" / "files" not in path.parents
        for line in path.read_text().splitlines()
        if opens.search(line) and "objects.read_text(" not in line
    }
    assert found <= own, found - own
