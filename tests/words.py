"""Finds wording that readers must read twice, in docstrings, comments and pages of help.

python -m tests.words    lists the findings
"""

from __future__ import annotations

import argparse
import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

# Words that point back; three in a sentence are a riddle.
_POINTERS = re.compile(
    r"\b(it|its|that of|those|that one|the one|ones|them|the others|the same|such|as many)\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=[.;:?!])\s+(?=[A-Z`(])")
# A short noun phrase, such as "Rows of a block". Before an article stands a verb: "Marks a block".
_NOUN_PHRASE = re.compile(
    r"(?!\w+ (?:the|an?|any|all|each|for) )(?:(?:The|An?) )?"
    r"(?:[\w'-]+ ){1,4}(?:of|in|per|for|between|from) (?:[^\s.;:]+ ?){1,8}\.?"
)
# A text with one of these words has a verb, or a clause that may tell why.
_CLAUSE = re.compile(
    r"\b(is|are|was|were|be|been|has|have|had|do|does|can|cannot|could|may|might|must|shall|should|"
    r"will|would|that|which|who|whose|so|since|because|where|if|unless|when|whether|while|than|not|"
    r"no|these|this|as)\b"
)
ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("lingvo_gshard", "benchmarks", "studies")
PATTERNS = {
    "pointers": None,
    "first word": re.compile(r"^(What|How|Which|Where)\b"),
    "that of": re.compile(r"\b(that|those) of\b"),
    "from which on": re.compile(r"\bfrom (which|where) on\b"),
    "has not": re.compile(r"\b(has|have|had) not (a|an|the|any|enough|all)\b"),
    "lacks": re.compile(r"\bwhat \w+ lacks?\b|\bof what \w+ (has|have) not\b"),
    "anew": re.compile(r"\banew\b"),
    "preposition": re.compile(
        r"\b(of|in|by|from|with|for|to|at|on|over|under|into|after|before|behind) (which|whom)\b"
    ),
}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of the docstrings and comments of a file; comments as blocks."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield first, " ".join(block)
                block = []
            if not block:
                first = token.start[0]
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    if block:
        yield first, " ".join(block)


def constants(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of the comments directly above the numbers that a module names.

    A number needs its reason: why this limit, why this value.
    """
    lines = source.split("\n")
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not _is_number(node.value):
            continue
        first = last = node.lineno - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        if first < last:
            yield first + 1, " ".join(line.lstrip("# ") for line in lines[first:last])


def _is_number(value: ast.expr | None) -> bool:
    """Returns whether an expression is a number, or a tuple of numbers: 2**20, (1, 8)."""
    kinds = (ast.BinOp, ast.UnaryOp, ast.Tuple, ast.operator, ast.unaryop, ast.expr_context)
    return value is not None and all(
        isinstance(part, kinds)
        or (isinstance(part, ast.Constant) and type(part.value) in (int, float))
        for part in ast.walk(value)
    )


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a text, each on one line."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*\w+: )|\n\s*- ", text):
        yield from _SENTENCE.split(" ".join(paragraph.split()))


def findings(path: pathlib.Path) -> Iterator[tuple[int, str, str]]:
    """Yields (line, name of the pattern, sentence) of each finding in a file."""
    source = path.read_text("utf-8")
    is_code = path.suffix == ".py"
    for line, text in constants(source) if is_code else ():
        if _NOUN_PHRASE.fullmatch(text) and not _CLAUSE.search(text):
            yield line, "constant", text
    for line, text in texts(source) if is_code else [(1, source)]:
        for name, pattern in PATTERNS.items():
            if name == "first word":
                first = text.partition("\n")[0]
                if pattern.search(first):
                    yield line, name, first
                continue
            for sentence in sentences(text):
                found = (
                    len(_POINTERS.findall(sentence)) >= 3
                    if pattern is None
                    else pattern.search(sentence)
                )
                if found:
                    yield line, name, sentence


def listed() -> list[str]:
    """Returns each finding as a line: its file, its line, its pattern, and the sentence."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}: {sentence}"
        for path in sources()
        for line, name, sentence in findings(path)
    ]


def sources() -> list[pathlib.Path]:
    """Returns the files whose wording is held."""
    pages = (ROOT / "lingvo_gshard" / "tools" / "help").glob("*.txt")
    return sorted([*pages, *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])


def main() -> None:
    """Lists the findings."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.words",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    print(*listed(), sep="\n")


if __name__ == "__main__":
    main()
