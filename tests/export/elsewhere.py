"""Runs programs in a new process that cannot import this package."""

import pathlib
import re
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "decoding.md"

# An import of a module that is None fails, wherever sys.path leads. Flag -I takes the current
# directory and PYTHONPATH out of sys.path.
_WITHOUT_PACKAGE = "import sys; sys.modules['lingvo_gshard'] = None\n"


def program_of_page(name: str) -> str:
    """Returns the program on docs/decoding.md whose first line is `# name`."""
    text = PAGE.read_text(encoding="utf-8")
    (found,) = re.findall(rf"^```python\n(# {re.escape(name)}\n.*?)^```", text, re.M | re.S)
    return found


def run(program: str, *arguments: object, stdin: str = "") -> str:
    """Runs a program in a new process; returns what it prints.

    Args:
      program: Python code.
      *arguments: its sys.argv[1:].
      stdin: its standard input.
    """
    result = subprocess.run(
        [sys.executable, "-I", "-c", _WITHOUT_PACKAGE + program, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
