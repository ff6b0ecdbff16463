# tests: wings/planning/search/exchanges.py, wings/dropless/exchanges.py
"""Checks which exchange a machine model finds fastest, the table in docs/moe.md, and defaults."""

import pathlib

import pytest

from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.dropless.exchanges import default_exchange
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.search.candidates import ExpertRows
from lingvo_gshard.wings.planning.search.costs import Collective
from lingvo_gshard.wings.planning.search.exchanges import exchanged, possible_exchanges
from lingvo_gshard.wings.planning.search.experiment_search import rates_of

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "moe.md"
TOKENS, BOUND = 8192, 2.0
# (model, machine, size of a token, experts of a token, sizes of groups).
CASES = (
    ("Qwen3 30B-A3B", "gpu:h100:1x8", 2048, 8, (8,)),
    ("Qwen3 30B-A3B", "gpu:h100:2x8", 2048, 8, (16,)),
    ("gpt-oss 120B", "gpu:h100:8x8", 2880, 4, (8, 16, 32, 64)),
    ("gpt-oss 120B", "gpu:b200:8x8", 2880, 4, (8, 16, 32, 64)),
    ("DeepSeek-V3", "gpu:b200:32x8", 7168, 8, (8, 16, 32, 64, 128, 256)),
    ("Mixtral 8x7B", "v5p:4x4x4", 4096, 2, (8,)),
)
ROWS = [(*case[:4], devices) for case in CASES for devices in case[4]]
SHOWN = [row for row in ROWS if f"| {row[0]} | `{row[1]}` | {row[4]} |" in DOCS.read_text()]


def milliseconds(machine: str, model_dim: int, choices: int, devices: int) -> dict[str, float]:
    """Returns the time of the exchanges of a layer, forward and backward, by name."""
    topology = topologies.get(machine)
    rates = rates_of(topology)
    mesh = Mesh((("rest", topology.devices // devices), ("data", devices)))
    rows = ExpertRows(choices, BOUND, "", itemsize=2)
    call = Collective("all-to-all", ("data",), TOKENS * choices * model_dim * rows.itemsize)
    found = {}
    for name in possible_exchanges(rates.platform, devices, rows):
        calls = [
            exchanged(name, call, rows, devices, returns, rates.platform)
            for returns in (False, True)
        ]
        found[name] = sum(
            2e3 * rates.collective_seconds(x.kind, x.bytes, x.axes, mesh) for x in calls
        )
    return found


def row_of_docs(model: str, machine: str, devices: int, found: dict[str, float]) -> str:
    times = [f"{found[x]:.3g}" if x in found else "-" for x in ("gathered", "fixed", "ragged")]
    fastest = min(found, key=found.__getitem__)
    return f"| {model} | `{machine}` | {devices} | {' | '.join(times)} | `{fastest}` |"


def test_the_table_of_exchanges_has_rows():
    assert len(SHOWN) == 5


@pytest.mark.parametrize(("model", "machine", "model_dim", "choices", "devices"), SHOWN)
def test_the_table_of_exchanges_is_that_of_the_machine_model(
    model, machine, model_dim, choices, devices
):
    found = milliseconds(machine, model_dim, choices, devices)
    assert row_of_docs(model, machine, devices, found) in DOCS.read_text()


@pytest.mark.parametrize(("model", "machine", "model_dim", "choices", "devices"), ROWS)
def test_the_default_is_the_fastest_exchange(model, machine, model_dim, choices, devices):
    del model
    found = milliseconds(machine, model_dim, choices, devices)
    platform = rates_of(topologies.get(machine)).platform
    default = default_exchange(platform, devices, choices, BOUND)
    assert found[default] == min(found.values())


def test_exchanges_move_the_bytes_of_their_rows():
    rows = ExpertRows(choices=4, bound=2.0, exchange="", itemsize=2)
    tokens, model_dim = 100, 16
    call = Collective("all-to-all", ("data",), tokens * 4 * model_dim * 2)

    def moved(name: str, devices: int, returns: bool) -> tuple[str, int]:
        found = exchanged(name, call, rows, devices, returns, "cuda")
        return found.kind, found.bytes

    one = tokens * model_dim * 2
    assert moved("gathered", 16, False) == ("all-gather", 16 * one)
    assert moved("gathered", 16, True) == ("reduce-scatter", 2 * 16 * one)
    assert moved("gathered", 8, True) == ("all-to-all", 8 * one)
    assert moved("fixed", 16, False) == ("all-to-all", 2 * 4 * one)
    assert moved("ragged", 16, True) == ("ragged-all-to-all", 4 * one)
    assert possible_exchanges("cuda", 16, rows) == ("gathered", "fixed")
    unbounded = ExpertRows(4, 0.0, "", 2)
    assert possible_exchanges("tpu", 64, unbounded) == ("gathered", "ragged")
    assert possible_exchanges("cuda", 64, ExpertRows(4, 2.0, "fixed", 2)) == ("fixed",)
    assert possible_exchanges("", 8, unbounded) == ("fixed",)
