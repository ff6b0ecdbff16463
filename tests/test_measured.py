# tests: /docs/
"""Measures figures of the documentation again: what compilers report."""

import json
import pathlib
import re
import shlex

import pytest

from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.tools import inspect, plan
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from lingvo_gshard.wings.long_inputs.ring import RingKernel
from tests.runtime.sharded.causal_gradients import temporaries
from tests.test_docs import SHOWN, write_files

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute")

pytestmark = pytest.mark.slow


def rows():
    """Yields strategy, mesh, MiB of state and collectives of each row of the page's table."""
    row = r"^\| `(\w+)` \| `([\w=,]+)` \| ([\d.]+) \| [\d.]+ \|(.*)\|$"
    for strategy, mesh, state, rest in re.findall(row, PAGE, re.MULTILINE):
        cells = dict(zip(KINDS, map(str.strip, rest.split("|")), strict=True))
        yield strategy, mesh, state, {kind: cell for kind, cell in cells.items() if cell}


def measure(folder, strategy, mesh, *flags):
    """Returns the MiB of state and the collectives ("count: MiB" by kind) of a training step."""
    path = folder / "measured.json"
    experiment = "--experiment=translation.quickstart"
    options = [f"--mesh={mesh}", f"--strategy={strategy}", "--compile", f"--json={path}"]
    assert inspect.main([inspect.NAME, experiment, *options, *flags]) == 0
    record = json.loads(path.read_text())
    state = record["weights_bytes_per_device"] + record["moments_bytes_per_device"]
    sums = dict.fromkeys(KINDS, (0, 0))
    for row in record["compiled"]["collectives"]:
        count, size = sums[row["kind"]]
        sums[row["kind"]] = count + row["count_per_step"], size + row["bytes_per_step"]
    found = {kind: f"{n}: {size / 2**20:.1f}" for kind, (n, size) in sums.items() if n}
    return f"{state / 2**20:.1f}", found


@pytest.mark.parametrize("strategy,mesh,state,collectives", list(rows()))
def test_the_table_of_strategies_is_what_is_measured(tmp_path, strategy, mesh, state, collectives):
    command = re.search(r"The command for one row:\n\n```bash\n(.*?)```", PAGE, re.DOTALL)[1]
    flags = re.findall(r"--gin_param='([^']+)'", command)
    assert len(flags) == 5
    changes = [f"--gin_param={flag}" for flag in flags]
    assert measure(tmp_path, strategy, mesh, *changes) == (state, collectives)


def test_groups_that_do_not_divide_evenly_cost_what_the_page_says(tmp_path):
    _, found = measure(tmp_path, "expert", "data=8")
    gathers, gathered, permutes, permuted = re.search(
        r"has (\d+)\s+all-gathers \(([\d.]+) MiB\) and (\d+) collective-permutes \(([\d.]+) MiB\)",
        PAGE,
    ).groups()
    assert found["all-gather"] == f"{gathers}: {gathered}"
    assert found["collective-permute"] == f"{permutes}: {permuted}"


def memory_rows():
    """Yields axis, strategy, attention and MiB by number of devices of each row of the table."""
    page = (ROOT / "docs" / "pipelines_and_long_inputs.md").read_text(encoding="utf-8")
    row = r"^\| `(context|model)`(?:, `(\w+)`)? \| ([^|]+) \|((?: [\d.]* ?\|)+)$"
    for axis, strategy, attention, cells in re.findall(row, page, re.MULTILINE):
        sizes = dict(zip((1, 2, 4, 8), map(str.strip, cells.split("|")), strict=False))
        yield axis, strategy or "context", attention, {n: size for n, size in sizes.items() if size}


@pytest.mark.parametrize("axis,strategy,attention,sizes", list(memory_rows()))
def test_the_memory_of_long_rows_is_what_is_measured(axis, strategy, attention, sizes):
    kernel = RingKernel if "ring" in attention else DenseKernel
    values = {}
    if block_size := re.search(r"block_size=(\d+)", attention):
        values["block_size"] = int(block_size[1])
        kernel = RingKernel if "ring" in attention else BlockwiseKernel
    values |= {"kernel": kernel, "num_layers": 2, "model_dim": 64, "length": 2048}
    found = {n: temporaries(n, strategy, axis, **values) / 2**20 for n in sizes}
    assert {n: f"{size:.1f}" for n, size in found.items()} == sizes


def test_the_table_of_memory_is_found():
    assert len(list(memory_rows())) == 6


def words(line):
    return " ".join(line.split())


def test_a_plan_prints_the_memory_that_the_page_shows(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "memory_and_communication.md").read_text(encoding="utf-8")
    write_files(page, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command, shown = SHOWN.search(page).groups()
    assert plan.main(shlex.split(command)) == 0
    printed = set(map(words, capsys.readouterr().out.splitlines()))
    rows = [words(line) for line in shown.splitlines() if re.search(r"\d", line)]
    assert len(rows) == 5
    assert [row for row in rows if row not in printed] == []
