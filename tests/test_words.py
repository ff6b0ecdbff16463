# tests: /lingvo_gshard/, /benchmarks/, /studies/, /tests/words.py
"""Holds docstrings and comments to wording that is understood at first reading."""

import pytest

from tests import words


def test_no_sentence_needs_a_second_reading():
    found = words.listed()
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("How the compilation ended.", "first word"),
        ("Its size is that of the weight.", "that of"),
        ("Those of all parts add up to it, as many as the one has of them.", "pointers"),
        ("The step from which on a frequency is kept.", "from which on"),
        ("A model that has not a decoder.", "has not"),
        ("Adds what jax lacks.", "lacks"),
        ("Initializes the weights anew.", "anew"),
        ("The file in which it is stored.", "preposition"),
    ],
)
def test_each_pattern_is_found(tmp_path, text, pattern):
    path = tmp_path / "module.py"
    path.write_text(f'"""{text}"""\n')
    assert pattern in [name for _, name, _ in words.findings(path)]


@pytest.mark.parametrize(
    ("text", "value", "is_found"),
    [
        ("Rows of a block.", "128", True),
        ("Maximum number of rows of a block.", "2**9", True),
        ("Sizes of a picture's squares, in pixels.", "2, 16", True),
        ("Larger blocks leave the cache of a core.", "128", False),
        ("Marks the end of a row.", "-1", False),
        ("Rows of a block, so that it stays in a cache.", "128", False),
        ("Rows of a block. Larger blocks leave the cache.", "128", False),
        ("Name of the file in the run's directory.", '"rows"', False),
    ],
)
def test_the_comment_of_a_number_gives_a_reason(tmp_path, text, value, is_found):
    path = tmp_path / "module.py"
    path.write_text(f'"""A module."""\n\n# {text}\nSIZE = {value}\n')
    found = [(line, name) for line, name, _ in words.findings(path)]
    assert found == ([(3, "constant")] if is_found else [])


def test_comments_are_read_as_blocks_and_code_is_not(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""A module."""\n\n# The size\n# that of a row has.\nSIZE = "that of"\n')
    assert [(line, name) for line, name, _ in words.findings(path)] == [(3, "that of")]


def test_a_plain_text_has_no_finding(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""Returns the size of a weight.\n\nArgs:\n  name: the weight.\n"""\n')
    assert not list(words.findings(path))
