"""Measures figures of the documentation again: what `gshard-inspect --compile` reports."""

import json
import pathlib
import re

import pytest

from lingvo_gshard.tools import inspect

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
    assert len(flags) == 4
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
