"""Breaks random lines of the heart, one at a time, and runs the tests that belong to the file.

    python -m tests.mutations --count=20 --seed=1

A mutation that no test notices is printed with its place: a test is missing there, or the line
makes no difference. The repository stays as it is, since all work is on a copy.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tests.belonging import PACKAGE, ROOT, Belonging

# Folders of the heart, as docs/architecture.md has them.
HEART = ("core", "sharding", "layers", "data", "tasks", "training", "runtime", "params")
_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_SIGNS: dict[type[ast.AST], str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//"},
    **{ast.Mod: "%", ast.And: "and", ast.Or: "or", ast.Lt: "<", ast.LtE: "<="},
    **{ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"},
    **{ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"},
}
# Arguments that make no difference to a correct program.
_CHECKS = ("frozen", "strict")
# Exit codes of pytest.
_PASSED, _NO_TESTS = 0, 5


class Mutation:
    """A file with one part of an expression replaced.

    Attributes:
      path: the file, relative to the repository.
      line: number of the line.
      text: what the file contains with the mutation.
      what: the change in words.
    """

    def __init__(self, path: str, source: str, place: tuple[int, int, int], old: str, new: str):
        line, start, end = place
        lines = source.splitlines(keepends=True)
        # Offsets of syntax trees count bytes.
        encoded = lines[line - 1].encode()
        part = encoded[start:end].decode()
        changed = part.replace(old, new, 1)
        assert changed != part
        lines[line - 1] = (encoded[:start] + changed.encode() + encoded[end:]).decode()
        self.path, self.line, self.text = path, line, "".join(lines)
        self.what = f"{old} -> {new} in {lines[line - 1].strip()}"


def mutations_of(path: str, source: str) -> Iterator[Mutation]:
    """Returns all mutations of a file: of operators, comparisons, conditions and True and False."""
    tree = ast.parse(source)
    keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    checks = [keyword.value for keyword in keywords if keyword.arg in _CHECKS]
    for node in ast.walk(tree):
        if node in checks:
            continue
        if isinstance(node, ast.BinOp):
            yield from _between(path, source, node.op, node.left, node.right)
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
                yield from _between(path, source, op, left, right)
        elif isinstance(node, ast.BoolOp):
            yield from _between(path, source, node.op, *node.values[:2])
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            place = node.lineno, node.col_offset, node.col_offset + len(str(node.value))
            yield Mutation(path, source, place, str(node.value), str(not node.value))


def _between(
    path: str, source: str, op: ast.AST, left: ast.expr, right: ast.expr
) -> Iterator[Mutation]:
    new = _OPERATORS.get(type(op))
    if new is None or left.end_lineno != right.lineno:
        return
    start, end = left.end_col_offset or 0, right.col_offset
    part = source.splitlines()[right.lineno - 1].encode()[start:end].decode()
    if _SIGNS[type(op)] in part:
        place = right.lineno, start, end
        yield Mutation(path, source, place, _SIGNS[type(op)], _SIGNS[new])


def choose(count: int, draw: random.Random) -> list[Mutation]:
    """Returns mutations of different files of the heart that have tests of their own."""
    belonging, chosen = Belonging(), []
    files = [path for folder in HEART for path in (ROOT / PACKAGE / folder).rglob("*.py")]
    draw.shuffle(files)
    for file in files:
        path = str(file.relative_to(ROOT))
        found = list(mutations_of(path, file.read_text("utf-8")))
        if found and belonging.tests_of([path])[path]:
            chosen.append(draw.choice(found))
        if len(chosen) == count:
            break
    return chosen


def is_noticed(mutation: Mutation, copy: pathlib.Path) -> bool:
    """Returns whether a fast test of a file fails with a mutation of the file.

    Args:
      mutation: what is broken.
      copy: a copy of the repository.
    """
    file = copy / mutation.path
    before = file.read_text("utf-8")
    file.write_text(mutation.text, "utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        ended = subprocess.run(
            [*command, f"--belongs-to={mutation.path}"], cwd=copy, capture_output=True, check=False
        )
    finally:
        file.write_text(before, "utf-8")
    return ended.returncode not in (_PASSED, _NO_TESTS)


def main() -> None:
    """Prints what happens to each mutation. Exits with 1 if one was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--count", type=int, default=10, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0, help="chooses files and lines")
    given = parser.parse_args()
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "copy")
        subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
        for mutation in choose(given.count, random.Random(given.seed)):
            noticed = is_noticed(mutation, copy)
            survivors += not noticed
            place = f"{mutation.path}:{mutation.line}"
            print(f"{'noticed ' if noticed else 'SURVIVED'} {place}: {mutation.what}", flush=True)
    print(f"{survivors} of {given.count} were not noticed")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
