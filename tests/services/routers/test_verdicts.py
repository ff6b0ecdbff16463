# tests: wings/services/routers/router_records.py
"""Tests the verdicts on routers: collapsed routers and dead experts, named once."""

import numpy as np
import pytest

from lingvo_gshard.layers.moe import MixtureOfExperts, Top2Router
from lingvo_gshard.wings.published_layers.routers import HashRouter
from lingvo_gshard.wings.services.routers.router_records import Verdicts, concentration
from lingvo_gshard.wings.services.run_options import Routers
from tests.services.routers.test_router_records import record

LAYER = "encoder.layers[1].feed_forward"


def layer(router):
    """Returns a layer with experts."""
    sizes = {"model_dim": 8, "num_experts": 4, "hidden_dim": 8, "has_token_ids": True}
    return MixtureOfExperts.params().set(**sizes, router=router).instantiate(path=LAYER)


def verdicts(router=None, **values):
    """Returns verdicts with these values of `run.routers`."""
    router = router or Top2Router.params().set(auxiliary_loss_weight=0.5)
    return Verdicts(Routers.params().set(**values), {LAYER: layer(router)})


def add(judge, *choices):
    """Returns the dead experts and the lines after each watched step, given its choices."""
    steps = range(50, 50 * len(choices) + 50, 50)
    found = [judge.add(record(s, c)) for s, c in zip(steps, choices, strict=True)]
    return [r.dead_since for r, _ in found], [lines for _, lines in found]


@pytest.mark.parametrize(
    ("choices", "k", "expected"),
    [
        ((5, 5, 5, 5), 2.0, 0.0),
        ((10, 10, 0, 0), 2.0, 1.0),
        ((20, 0, 0, 0), 2.0, 1.0),
        ((20, 0, 0, 0), 1.0, 1.0),
        ((10, 10, 0, 0), 1.0, 1 / 3),
        ((8, 6, 4, 2), 2.0, 0.4),
        ((0, 0), 1.0, -1.0),
        ((3, 1), 2.0, 0.0),
    ],
)
def test_concentration_is_0_for_even_loads_and_1_for_the_same_experts(choices, k, expected):
    found = concentration(record(choices=choices, experts_per_token=k))
    np.testing.assert_allclose(found, expected)


def test_a_collapsed_router_is_named_once_with_its_busiest_expert_and_advice():
    judge = verdicts(window=9)
    even, collapsed = (5, 5, 5, 5), (2, 1, 14, 3)
    _, lines = add(judge, even, collapsed, collapsed, even, collapsed)
    assert lines[0] == lines[2] == []
    warning, advice = lines[1]
    assert warning == (
        f"Warning: step 100: the router of {LAYER} has collapsed: expert 2 gets 70.0% of the "
        "choices; an even share is 25.0%"
    )
    assert advice.startswith(
        f"{LAYER}: the auxiliary_loss_weight of its Top2Router is 0.5; try a larger one."
    )
    assert lines[3] == [
        f"step 200: the router of {LAYER} is no longer collapsed, as it was since step 100"
    ]
    assert len(lines[4]) == 1 and "step 250" in lines[4][0]
    assert judge.summary()[1] == f"  {LAYER}  collapsed since step 250"


def test_the_limit_is_a_hyperparameter():
    choices = (8, 6, 4, 2)
    assert add(verdicts(collapse=0.41), choices)[1] == [[]]
    assert "has collapsed" in add(verdicts(collapse=0.39), choices)[1][0][0]


def test_dead_experts_are_told_when_the_window_is_full_with_how_long():
    judge = verdicts(window=3, collapse=1.0)
    dead, lines = add(
        judge, (9, 1, 5, 5), (9, 0, 5, 5), (0, 0, 9, 5), (4, 0, 9, 5), (4, 0, 9, 5), (4, 2, 9, 5)
    )
    assert dead == [{}, {}, {}, {1: 100}, {1: 100}, {}]
    assert [len(x) for x in lines] == [0, 0, 0, 2, 0, 0]
    assert lines[3][0] == (
        f"Warning: step 200: {LAYER}: expert 1 has had no token since step 100, in 3 watched steps"
    )
    assert judge.summary() == []


def test_several_dead_experts_are_told_together():
    judge = verdicts(window=2)
    many = np.eye(1, 12, dtype=int)[0] * 7
    _, lines = add(judge, many, many)
    deaths = [line for line in lines[1] if "no token" in line]
    assert len(deaths) == 1
    assert "experts 1, 2, 3, 4, 5, 6, 7, 8 and 3 more have had no token since step 50" in deaths[0]
    assert "dead experts 1, 2" in judge.summary()[-1]


def test_advice_depends_on_the_router():
    judge = verdicts(HashRouter.params())
    _, (lines,) = add(judge, (40, 0, 0, 0))
    assert "HashRouter learns nothing" in lines[1]


def test_a_run_has_few_warnings():
    judge = verdicts(window=1)
    flips = [(10, 0, 5, 5), (10, 5, 0, 5)] * 30
    _, lines = add(judge, *flips)
    assert len([line for step in lines for line in step if line.startswith("Warning")]) == 20
