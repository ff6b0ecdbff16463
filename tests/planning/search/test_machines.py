# tests: wings/planning/search/machines.py, wings/planning/search/experiment_search.py
"""Orders machines by the time and by the price of the best candidate of each."""

import pytest

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.search import machines
from lingvo_gshard.wings.planning.search.choices import Candidate, ChoicePaths
from lingvo_gshard.wings.planning.search.costs import Cost
from lingvo_gshard.wings.planning.search.experiment_search import (
    COST,
    TIME,
    ExperimentSearch,
    SearchOptions,
)
from lingvo_gshard.wings.planning.search.machines import search_machines
from lingvo_gshard.wings.planning.search.results import RatedCandidate, SearchResult
from tests.tools.tiny_quickstart import EXPERIMENT, SETTINGS

# Seconds of a step: one chip fits nothing, and of the others the larger one is faster and dearer.
SECONDS = {"v5e:1x1": None, "v5e:2x2": 2.0, "v5e:2x4": 1.5, "cpu:8": 9.0}
TOKENS = 10


@pytest.fixture(autouse=True)
def _searches_find_these_times(monkeypatch):
    def search(params, topology, *_):
        seconds = SECONDS[topology.name]
        best = seconds and RatedCandidate(Candidate("", ""), Cost(compute_seconds=seconds))
        result = SearchResult(best, (), (), (), 1)
        return ExperimentSearch(params, topology, result, None, ChoicePaths(), TOKENS)

    monkeypatch.setattr(machines, "search_experiment", search)


def searched(goal, *names):
    found = [topologies.get(name) for name in names]
    options = SearchOptions(search_compilations=0, search_for=goal)
    return search_machines(experiment(EXPERIMENT, SETTINGS), found, options)


@pytest.mark.parametrize(
    ("goal", "order"),
    [(TIME, ["v5e:2x4", "v5e:2x2", "v5e:1x1"]), (COST, ["v5e:2x2", "v5e:2x4", "v5e:1x1"])],
)
def test_the_best_machine_is_first_and_where_nothing_fits_last(goal, order):
    found = searched(goal, "v5e:1x1", "v5e:2x2", "v5e:2x4")
    assert [search.topology.name for search in found] == order
    assert found[-1].result.best is None and found[-1].billion_tokens is None
    for search in found[:-1]:
        chip, chips = search.topology.chip, search.topology.chips
        hours = 1e9 / TOKENS * SECONDS[search.topology.name] / 3600 * chips
        assert search.billion_tokens.price == pytest.approx(hours * chip.price.amount)


def test_a_machine_without_a_price_may_be_the_fastest_and_not_the_cheapest():
    assert searched(TIME, "cpu:8")[0].billion_tokens.price is None
    with pytest.raises(ValueError, match="^`search_for=cost`: no price of .* leave cpu:8 out of"):
        searched(COST, "v5e:2x2", "cpu:8")
