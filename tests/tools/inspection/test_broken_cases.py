# tests: /docs/memory_and_communication.md, tools/inspection/activations.py
# tests: tools/inspection/inspection.py
"""The broken cases of docs/memory_and_communication.md: gshard-inspect names layer and line."""

import json
import pathlib

import pytest

from lingvo_gshard.tools import inspect
from tests.test_docs import ROOT, TINY, write_files

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "memory_and_communication.md").read_text(encoding="utf-8")
LAYER = "encoder.layers[0].feed_forward"


def inspected(case: str, folder: pathlib.Path, capsys, *flags: str) -> tuple[dict, str]:
    """Returns the JSON of what gshard-inspect --compile finds in a case, and what it prints."""
    (small,) = [given for program, given in TINY.items() if case in program]
    record = folder / "record.json"
    experiment = f"--experiment={case}.experiment"
    assert inspect.main([inspect.NAME, experiment, *flags, *small, f"--json={record}"]) == 0
    return json.loads(record.read_text())["compiled"], capsys.readouterr().out


def line_of(file: pathlib.Path, text: str) -> str:
    """Returns the file and number of the only line that contains a text."""
    (number,) = [i for i, line in enumerate(file.read_text().splitlines(), 1) if text in line]
    return f"{file.name}:{number}"


@pytest.fixture
def cases(tmp_path, monkeypatch):
    """Writes the page's files into a folder of Python's path, and returns them by name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return {path.stem: path for path in write_files(PAGE, tmp_path)}


def test_a_forgotten_annotation_that_replicates_a_large_tensor(cases, tmp_path, capsys):
    flags = ("--mesh=data=8", "--strategy=data", f"--activations={LAYER}")
    found, out = inspected("time_major", tmp_path, capsys, *flags)
    line = line_of(cases["time_major"], "tf.nn.relu")
    (hidden,) = [row for row in found["activations"] if row["source"] == line]
    # 24 rows of 96 positions, all of them on each of 8 devices.
    assert (hidden["layer"], hidden["shape"]) == (LAYER, [24 * 96, 512])
    assert hidden["parts"] == 1 and hidden["bytes_per_device"] == 4 * 24 * 96 * 512
    (warning,) = [text for text in out.splitlines() if text.startswith("Warning: ")]
    assert warning in PAGE and line in warning and LAYER in warning


def test_a_layout_that_causes_an_all_gather(cases, tmp_path, capsys):
    flags = ("--mesh=data=4,model=2", "--strategy=data_tensor", "--compile")
    found, _ = inspected("gathering", tmp_path, capsys, *flags)
    (gather,) = [
        row
        for row in found["reshardings"]
        if row["layout"] == "BL_" and row["layer"] == LAYER and row["phase"] == "forward"
    ]
    assert (gather["kind"], gather["axes"]) == ("all-gather", ["model"])
    assert gather["operation"] == "Relu"
    assert gather["annotated_at"] == line_of(cases["gathering"], '"BL_"')
    assert gather["source"] == line_of(cases["gathering"], "tf.nn.relu")
    assert gather["bytes_per_step"] == 4 * 24 * 96 * 512 // 4
    assert "--compile" in PAGE and gather["annotated_at"] in PAGE
