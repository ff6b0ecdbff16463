# tests: wings/planning/search/explanation.py, wings/planning/search/results.py
"""What a search says about its choice: the next best value of each choice, beside the best one."""

import msgspec

from lingvo_gshard.wings.planning.search.choices import Candidate
from lingvo_gshard.wings.planning.search.costs import Cost
from lingvo_gshard.wings.planning.search.explanation import explain
from lingvo_gshard.wings.planning.search.results import (
    CompiledCost,
    RatedCandidate,
    SearchResult,
    front,
)

BEST = Candidate("data=8", "B->data", (), "none", micro_batches=1)
CAPACITY = 1000


def rated(seconds, peak, compiled=None, fits=True, name="", problem="", **changes):
    """Returns a candidate with (seconds, peak) by the cost model and, if given, by compilation."""
    return RatedCandidate(
        msgspec.structs.replace(BEST, **changes),
        Cost(compute_seconds=seconds, weights=peak),
        name,
        CompiledCost(fits, compiled[1], compiled[0]) if compiled else None,
        problem,
    )


def result(best, *others, baselines=()):
    return SearchResult(best, front([best]), (best, *others), tuple(baselines), CAPACITY)


def values_of(found):
    return [(row.choice, row.value) for row in found]


def test_figures_of_one_source_are_compared():
    best = rated(2.0, 400, compiled=(1.0, 500))
    compiled = rated(1.9, 300, compiled=(1.25, 450), mesh="data=4,fsdp=2")
    modelled = rated(3.0, 100, rematerialize="full")
    sharding, policy = explain(result(best, compiled, modelled))
    assert (sharding.choice, sharding.value) == ("sharding", "data=4,fsdp=2 B->data")
    assert sharding.is_compiled and (sharding.ratio, sharding.more_bytes) == (1.25, -50)
    assert (policy.choice, policy.chosen, policy.value) == ("rematerialize", "none", "full")
    # The model rates the best candidate at 2 seconds and 400 bytes.
    assert not policy.is_compiled and (policy.ratio, policy.more_bytes) == (1.5, -300)


def test_each_value_is_represented_by_its_best_candidate():
    best = rated(2.0, 400, compiled=(1.0, 500))
    rows = (
        rated(2.5, 400, micro_batches=2),
        rated(2.2, 400, micro_batches=2),
        rated(1.0, 2000, micro_batches=2),
        rated(1.5, 2000, micro_batches=4),
    )
    found = explain(result(best, *rows))
    assert [(row.choice, row.value, row.ratio, row.fits) for row in found] == [
        ("micro_batches", "2", 1.1, True),
        ("micro_batches", "4", 0.75, False),
    ]


def test_of_shardings_the_next_best_and_the_best_name_are_told():
    best = rated(2.0, 400)
    rows = [rated(2.0 + n, 400, mesh=f"data={n}") for n in range(1, 4)]
    names = [
        rated(5.0, 400, name="data", strategy="data"),
        rated(3.0, 400, name="fsdp", strategy="fsdp"),
        rated(1.0, 9000, name="tensor", strategy="tensor"),
    ]
    found = explain(result(best, *rows, baselines=names))
    assert values_of(found) == [("sharding", "data=1 B->data"), ("sharding", "data=8 fsdp")]


def test_variants_and_what_cannot_be_compiled():
    best = rated(2.0, 400, compiled=(1.0, 500), compile_options=("xla_a=True",))
    plain = rated(2.0, 400, compiled=(1.1, 500))
    refused = rated(2.0, 400, dispatch="EinsumDispatch", problem="too large")
    found = explain(result(best, plain, refused))
    assert [(row.choice, row.chosen, row.value) for row in found] == [
        ("dispatch", "the experiment's", "EinsumDispatch"),
        ("compile_options", "xla_a=True", "the experiment's"),
    ]
    assert found[0].problem == "too large" and not found[0].is_compiled


def test_nothing_is_explained_if_nothing_fits():
    row = rated(2.0, 4000)
    assert explain(SearchResult(None, (), (row,), (), CAPACITY)) == []
