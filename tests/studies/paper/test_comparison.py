# tests: /studies/paper/, wings/giants/experiments.py
"""Checks that published figures are consistent and are compared with the right numbers of plans."""

from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.core.config import registry
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.planning.machines import topologies
from studies.paper import comparison as paper
from studies.paper import figures
from studies.paper import rows as paper_rows

GIGA = 10**9


def comparison(name):
    """Returns the comparison of that name."""
    (found,) = (c for c in paper_rows.COMPARISONS if c.name == name)
    return found


def namespaces(rows):
    """Returns an object for each row, with the row's fields as attributes."""
    return [SimpleNamespace(**row) for row in rows]


def compared(name, **fields):
    """Returns a comparison's row, given plans with these fields."""
    found = comparison(name)
    return paper.compare(found, dict.fromkeys(found.cases, SimpleNamespace(**fields)))


def plan_of(model, steps_per_second):
    """Returns the fields of a plan of one of the paper's models at this speed."""
    row = figures.TABLE[model]
    return {"devices": row.cores, "tokens_per_second": steps_per_second * row.batch}


@pytest.mark.parametrize("model", figures.TABLE)
def test_published_core_years_match_cores_and_days(model):
    row = figures.TABLE[model]
    # Both are rounded: 1.4 days to 4%.
    assert row.core_years == pytest.approx(row.cores * row.days / 365, rel=0.06)


@pytest.mark.parametrize("model", [m for m in figures.TABLE if m.startswith("moe_")])
def test_most_published_weights_are_expert_weights(model):
    _, experts, layers = model.split("_")
    of_experts = int(experts[:-1]) * int(layers[:-1]) // 2 * 2 * 1024 * 8192
    assert figures.TABLE[model].weights == pytest.approx(of_experts, rel=0.05)


def test_timed_models_were_trained_on_the_same_number_of_tokens():
    tokens = [row.tokens for row in figures.TABLE.values() if row.tokens]
    assert tokens == pytest.approx([1.04e12, 1.046e12], rel=0.01)


@pytest.mark.parametrize("case", paper_rows.CASES.values(), ids=lambda case: case.name)
def test_every_case_is_an_experiment_whose_mesh_fits_its_topology(case):
    params = registry.get(case.experiment)
    for path, value in case.settings.items():
        assert params.get(path) != value
        params.set_path(path, value)
    topology = topologies.get(case.topology)
    assert Mesh.parse(params.sharding.mesh).size == topology.devices
    stack = params.task.encoder
    if stack.moe_every:
        assert stack.moe.num_experts == topology.devices
    assert params.input.batch_rows % topology.devices == 0


@pytest.mark.parametrize("name", ["moe_16e_36l", "moe_128e_36l_2048_tokens", "moe_2048e_36l"])
def test_timed_cases_have_2048_tokens_per_core(name):
    case = paper_rows.CASES[name]
    params = registry.get(case.experiment)
    rows = case.settings.get("input.batch_rows", params.input.batch_rows)
    assert rows * params.input.target_length == 2048 * topologies.get(case.topology).devices


def test_comparisons_use_exactly_the_defined_cases():
    names = [c.name for c in paper_rows.COMPARISONS]
    assert len(set(names)) == len(names)
    assert paper_rows.cases_of(paper_rows.COMPARISONS) == list(paper_rows.CASES.values())


def test_activations_are_temporaries_without_gradients():
    sizes = SimpleNamespace(weights=2 * GIGA, activations=4.18 * GIGA)
    row = compared("activations.moe_512e_12l", bytes_per_device=sizes)
    assert row.ours == pytest.approx(2.18)
    assert row.ratio == pytest.approx(1)
    assert row.within


def test_the_published_speed_costs_the_published_core_years():
    for model in ("moe_512e_12l", "moe_512e_36l"):
        published = figures.TABLE[model].steps_per_second
        row = compared(f"core_years.{model}", **plan_of(model, published))
        assert row.ratio == pytest.approx(1, abs=0.02)


def test_cost_is_proportional_to_cores_and_step_time():
    # A quarter of the steps on 16 times the cores, each of four times the tokens.
    plans = {
        "moe_128e_36l": SimpleNamespace(**plan_of("moe_128e_36l", 2.0)),
        "moe_2048e_36l": SimpleNamespace(**plan_of("moe_2048e_36l", 2.0)),
    }
    row = paper.compare(comparison("cost_growth.36l"), plans)
    assert row.ours == pytest.approx(4)
    assert row.within
    row = paper.compare(
        comparison("step_growth.36l"),
        {"moe_2048e_36l": SimpleNamespace(seconds_per_step=3.0)}
        | {"moe_128e_36l_2048_tokens": SimpleNamespace(seconds_per_step=2.0)},
    )
    assert row.ours == 1.5
    assert row.within


def test_all_to_alls_are_compared_by_seconds_per_byte():
    def plan(seconds):
        calls = {"kind": "all-to-all", "bytes": 100, "count": 3, "seconds_bound": 3 * seconds}
        other = {"kind": "all-reduce", "bytes": 100, "count": 1, "seconds_bound": 99}
        rows = [calls, {**calls, "bytes": 200, "count": 1}, other]
        return SimpleNamespace(collectives=[SimpleNamespace(**row) for row in rows])

    plans = {"moe_2048e_36l": plan(4.0), "moe_128e_36l_2048_tokens": plan(1.0)}
    assert paper.compare(comparison("all_to_all_growth.36l"), plans).ours == pytest.approx(4)


def test_attention_efficiency_averages_attention_layers():
    peak = topologies.get("v3:16x16").chip.peak("bfloat16")
    rows = [
        {"layer": "encoder/layers/body_0/self_attention", "flops": peak, "seconds": 1.0},
        {"layer": "decoder/layers/body_0/cross_attention", "flops": peak, "seconds": 3.0},
        {"layer": "encoder/layers/body_0/feed_forward", "flops": peak, "seconds": 9.0},
    ]
    row = compared(
        "attention_efficiency.moe_512e_36l", topology="v3:16x16", layers=namespaces(rows)
    )
    assert row.ours == pytest.approx(0.5)
    assert row.within


def test_recomputation_must_be_absent_if_the_paper_has_none():
    layers = namespaces([{"phase": "forward", "seconds": 1.0}])
    fields = {"seconds_per_step": 2.0, "layers": layers}
    row = compared("rematerialization.moe_512e_12l", **fields)
    assert (row.ours, row.ratio, row.within) == (0, None, True)
    layers += namespaces([{"phase": "rematerialized", "seconds": 1.0}])
    row = compared("rematerialization.moe_512e_12l", **fields)
    assert (row.ours, row.within) == (0.5, False)
    assert compared("rematerialization.moe_512e_36l", **fields).ratio == pytest.approx(0.5 / 0.28)


@hypothesis.given(st.floats(0.01, 100))
def test_bound_must_be_above_the_published_speed_and_close_to_it(speed):
    row = compared("steps_bound.moe_512e_36l", steps_per_second_bound=speed)
    assert row.within == (1.05 <= speed <= 2.5 * 1.05)


def test_rows_are_selected_by_name_quantity_and_model():
    def names(*chosen):
        return [c.name for c in paper_rows.select(chosen)]

    assert len(names()) == len(paper_rows.COMPARISONS)
    assert names("weights.moe_512e_12l") == ["weights.moe_512e_12l"]
    models = ("moe_128e_12l", "moe_512e_12l", "moe_2048e_36l")
    assert names("weights") == [f"weights.{model}" for model in models]
    assert "core_years.moe_512e_36l" in names("moe_512e_36l", "weights")
    with pytest.raises(ValueError, match="`rows`: unknown row 'weight'.*'weights'"):
        names("weight")


def test_row_without_plans_gives_the_reason():
    row = paper.not_compared(comparison("weights.moe_512e_12l"), "it is too large")
    assert (row.ours, row.ratio, row.within) == (None, None, None)
    assert row.explanation == "it is too large"
