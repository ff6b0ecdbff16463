# tests: /docs/size/
"""The count of files and lines, on a tree whose numbers are known."""

import pathlib

import pytest

import lingvo_gshard
from docs.size import __main__ as page
from docs.size.count import Size, executed_by_a_step, folders
from docs.size.house import House, Import


def test_files_and_lines_of_a_tree_are_counted(tmp_path):
    (tmp_path / "core" / "deep").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "__init__.py").write_text("1\n2\n")
    (tmp_path / "core" / "a.py").write_text("1\n2\n3\n")
    (tmp_path / "core" / "b.py").write_text("1\n")
    (tmp_path / "core" / "deep" / "c.py").write_text("\n" * 8)
    (tmp_path / "core" / "notes.txt").write_text("1\n" * 99)
    assert folders(tmp_path) == [Size("core/", 3, 12, 3), Size("all", 4, 14, 2)]


def test_the_page_has_one_table_between_its_marks():
    tables = page.table([Size("core/", 1200, 34567, 8)])
    assert tables.splitlines()[-1] == "| core/ | 1,200 | 34,567 | 8 |"
    text = page.PAGE.read_text(encoding="utf-8")
    again = page.with_tables(text, tables)
    assert text.count(page.BEGIN) == text.count(page.END) == 1
    assert again.count("| core/ |") == 1 and page.with_tables(again, tables) == again


def test_imports_between_the_heart_and_its_wings_are_counted(tmp_path):
    package = tmp_path / "toy"
    for path, text in {
        "__init__.py": "",
        "core.py": "import numpy\nA = B = 1\n",
        "layer.py": "from toy.core import A\nfrom toy.kernels import fused\n",
        "kernels/__init__.py": "",
        "kernels/fused.py": "from toy.core import A, B\nfrom toy import layer\n",
        "data/__init__.py": "import lazy_loader\n",
        "data/__init__.pyi": "from . import rows as rows\nfrom .deep.text import Text as Text\n",
        "data/rows.py": "",
        "data/deep/__init__.py": "",
        "data/deep/text.py": "Text = Line = 1\n",
        "serving.py": "from toy.data import Text, rows\nfrom toy.data.deep.text import Line\n",
        "late.py": "def f():\n    import toy.plans\n    from toy.plans import C\n",
        "plans.py": "from toy.kernels.fused import A\nfrom toy.core import A\nC = 1\n",
    }.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    house = House(package, "kernels ^kernels/\n\nplanning ^plans\\.py\nserving ^serving\n")
    assert house.sizes() == [
        Size("heart", 8, 9, 1),
        Size("kernels", 2, 2, 1),
        Size("planning", 1, 3, 3),
        Size("serving", 1, 2, 2),
    ]
    assert house.breaches == [
        Import("late.py", "toy.plans", ""),
        Import("late.py", "toy.plans", "C"),
        Import("layer.py", "toy.kernels.fused", ""),
    ]
    assert {(i.target, i.name) for i in house.taken("kernels")} == {
        ("toy.core", "A"),
        ("toy.core", "B"),
        ("toy.layer", ""),
    }
    assert house.taken("planning") == [Import("plans.py", "toy.core", "A")]
    assert house.offered == {("toy.data.rows", ""), ("toy.data.deep.text", "Text")}
    assert house.taken("serving") == [
        Import("serving.py", "toy.data.deep.text", "Text", is_public=True),
        Import("serving.py", "toy.data.rows", "", is_public=True),
        Import("serving.py", "toy.data.deep.text", "Line"),
    ]


@pytest.mark.slow
def test_a_step_executes_fewer_files_than_its_command():
    package = pathlib.Path(lingvo_gshard.__file__).parent
    imported, executed, step = executed_by_a_step(package)
    assert imported.files > executed.files > step.files > 20
