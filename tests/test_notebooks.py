# tests: /docs/site/, /docs/first_translation.md
"""Makes notebooks of the tutorials and executes them, as a reader would in Jupyter."""

import ast
import importlib.util
import json
import os
import pathlib
import shutil

import pytest

from docs.site import notebooks

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = pathlib.Path(__file__).resolve().parents[1]
# These blocks are executed as scripts by tests/test_docs.py.
SCRIPTS = ("keras.md", "python_api.md", "your_own_layer.md")
TUTORIALS = [name for name in notebooks.PAGES if name not in SCRIPTS]
# The plan of a TPU pod needs the compiler of TPUs, a package of 300 MB.
NEEDS = {"plan_a_giant.md": "libtpu"}
_SECONDS = 1800


def made(text):
    return nbformat.reads(json.dumps(notebooks.notebook(text)), as_version=4)


def execute(notebook, folder):
    """Executes a notebook in a folder, with this source tree; returns the output of each cell."""
    client = nbclient.NotebookClient(
        notebook,
        timeout=_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        client.execute()
    return [
        "".join(out.text for out in cell.outputs if out.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_a_page_is_a_valid_notebook_without_outputs(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    notebook = made(text)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.source for cell in code] == [
        block[1].rstrip("\n") for block in notebooks.CODE.finditer(text)
    ]
    for cell in code:
        ast.parse(cell.source)
        assert cell.outputs == []
    assert notebook.cells[0].source.startswith("# ")
    assert all(".md" not in cell.source for cell in notebook.cells if cell.cell_type != "code")


def test_text_and_code_of_a_page_become_cells():
    page = """# Title

After [this page](other.md#part) and [that](https://example.org/x) you can count.

```python
print(1)
```

```text
1
```

Then:

```python
x = 2
```

```bash
ls
```
"""
    cells = made(page).cells
    assert [(cell.cell_type, cell.source) for cell in cells] == [
        ("markdown", "# Title\n\nAfter this page and [that](https://example.org/x) you can count."),
        ("code", "print(1)"),
        ("markdown", "Then:"),
        ("code", "x = 2"),
        ("markdown", "```bash\nls\n```"),
    ]


def test_a_notebook_runs_in_a_kernel(tmp_path):
    page = "# Try\n\n```python\nimport lingvo_gshard\n\nprint(lingvo_gshard.__name__)\n```\n"
    assert execute(made(page), tmp_path) == ["lingvo_gshard\n"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_and_prints_what_it_shows(name, tmp_path):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    printed = execute(made(text), tmp_path)
    for block, output in zip(notebooks.CODE.finditer(text), printed, strict=True):
        if block[2] is not None:
            assert output == block[2]
    shutil.rmtree(tmp_path)
