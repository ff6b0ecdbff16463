"""Names of earlier versions in Params, and what they are called today."""

from __future__ import annotations

import msgspec

from lingvo_gshard.core import objects, params_text


class _MovedOptions(msgspec.Struct, frozen=True):
    """Options that left a class.

    Attributes:
      cls: the class that has them today.
      options: each with the value that it has in a class without it.
    """

    cls: str
    options: dict[str, str]


class _Table(msgspec.Struct, frozen=True):
    """Old names and new names. Names of modules and classes begin within the package.

    Attributes:
      of_the_run: old options of the trainer that belong to the run today. The other old options of
        the trainer belong to the step.
      modules: module of an earlier version -> the module that has its classes today.
      classes: class of an earlier version -> the class today, where its module has other classes
        still.
      moved_options: class of an earlier version -> options that it had.
    """

    of_the_run: frozenset[str]
    modules: dict[str, str]
    classes: dict[str, str]
    moved_options: dict[str, _MovedOptions]


TABLE = objects.table_beside(__file__, "renames.json", _Table)
_TRAINER = "trainer"
_RUN_OPTIONS = "lingvo_gshard.training.run.options"
# Folders of an earlier version that stand in wings/ today.
_IN_WINGS = ("export", "hlo", "inference", "kernels", "open_models", "planning", "profiling")
_PACKAGE = "lingvo_gshard."


def path_today(path: str) -> str:
    """Returns today's name for a path of Params of an earlier version."""
    first, _, rest = path.partition(".")
    if first != _TRAINER or not rest:
        return path
    name = rest.partition(".")[0]
    return f"{'run' if name in TABLE.of_the_run else 'step'}.{rest}"


def lines_today(lines: list[params_text.Line]) -> list[params_text.Line]:
    """Returns lines of a params.txt with today's names.

    Args:
      lines: (path, value, number of the line).
    """
    found = [(path_today(path), class_today(value), number) for path, value, number in lines]
    found = _with_dropped_rows(_without_moved_options(found))
    is_old = any(path == f"{_TRAINER}.cls" for path, _, _ in lines)
    return [*found, ("run.cls", f"{_RUN_OPTIONS}.RunOptions", 0)] if is_old else found


def _without_moved_options(lines: list[params_text.Line]) -> list[params_text.Line]:
    """Returns lines without the options that left a class, or with the class that has them."""
    values = {path: value for path, value, _ in lines}
    classes: dict[str, str] = {}
    left_out: set[str] = set()
    for path, value in values.items():
        own = value.removeprefix(_PACKAGE)
        if not path.endswith(".cls") or own not in TABLE.moved_options:
            continue
        moved, stem = TABLE.moved_options[own], path.removesuffix("cls")
        options = {f"{stem}{name}": usual for name, usual in moved.options.items()}
        if all(values.get(option, default) == default for option, default in options.items()):
            left_out.update(options)
        else:
            classes[path] = f"{_PACKAGE}{moved.cls}"
    return [(path, classes.get(path, v), n) for path, v, n in lines if path not in left_out]


def _with_dropped_rows(lines: list[params_text.Line]) -> list[params_text.Line]:
    """Returns lines whose bounds of dropless dispatch drop rows, as all bounds did once."""
    known = {path for path, _, _ in lines}
    found = list(lines)
    for path, value, number in lines:
        choice = f"{path.removesuffix('bound')}over_bound"
        if path.endswith(".dispatch.bound") and float(value) and choice not in known:
            found.append((choice, "'drop'", number))
    return found


def last_path(text: str) -> str | None:
    """Returns the path that the last line of an earlier version's params.txt has.

    None for a text of today's version.
    """
    return f"{_TRAINER}.writers" if f"\n{_TRAINER}." in text else None


def class_today(name: str) -> str:
    """Returns today's dotted name for a class of an earlier version; other names as they are."""
    own = name.removeprefix(_PACKAGE)
    module, _, attribute = own.rpartition(".")
    if name.startswith(_PACKAGE) and own in TABLE.classes:
        return f"{_PACKAGE}{TABLE.classes[own]}"
    if name.startswith(_PACKAGE) and own.partition(".")[0] in _IN_WINGS:
        return f"{_PACKAGE}wings.{own}"
    if not name.startswith(_PACKAGE) or module not in TABLE.modules:
        return name
    return f"{_PACKAGE}{TABLE.modules[module]}.{attribute}"


params_text.RENAMES.register("earlier_versions")(
    params_text.Renames(path_today, class_today, lines_today, last_path)
)
