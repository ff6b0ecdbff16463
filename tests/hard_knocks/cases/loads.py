"""Loads of routers that are missing, damaged or of another model, and placements of them."""

import json

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import trained, write

_PLAN = "gshard-plan --experiment=translation.quickstart --topology=cpu:4 "
_EXPECTED = (
    "expected a file that gshard-experts report --json or gshard-experts watched --json wrote, or "
    "the routers.jsonl of a run"
)
_LAYER = "encoder.layers[1].feed_forward"


def _record(layer: str, choices: list[int]) -> dict:
    """Returns a record of step 50 in which two experts compute each token."""
    return {
        "step": 50,
        "layer": layer,
        "router": "Top2Router",
        "experts_per_token": 2.0,
        "tokens": 40,
        "choices": choices,
        "kept": choices,
        "dropped_share": 0.0,
        "load_entropy": 1.0,
    }


def _loads(*records: dict) -> tuple:
    return (write("load.json", json.dumps(records)),)


CASES = (
    Case(
        "loads that are not there",
        _PLAN + "--loads=load.json",
        error="--loads=load.json: cannot be read: No such file or directory",
    ),
    Case(
        "loads that are no JSON",
        _PLAN + "--loads=load.json",
        given=(write("load.json", "expert 1: 50%"),),
        error=f"--loads=load.json: not JSON (JSON is malformed: ...); {_EXPECTED}",
    ),
    Case(
        "metrics for loads",
        _PLAN + "--loads=metrics.json",
        given=(write("metrics.json", '{"step": 1, "loss": 2.5}'),),
        error="--loads=metrics.json: no loads of routers: Object missing required field `layers`; "
        + _EXPECTED,
    ),
    Case(
        "negative loads",
        _PLAN + "--loads=load.json",
        given=_loads(_record(_LAYER, [9, -4, 1, 1, 1, 1, 1, 1])),
        error=f"--loads=load.json: {_LAYER}, step 50: choices[1] is -4; expected a count, 0 or "
        "more",
    ),
    Case(
        "loads of a model with other layers",
        _PLAN + "--loads=load.json",
        given=_loads(_record("encoder.layers[3].feed_forward", [10] * 8)),
        error="--loads=load.json has loads of encoder.layers[3].feed_forward, which is no layer "
        f"with experts of translation.quickstart. Did you mean '{_LAYER}'? translation.quickstart "
        "has 2 layers with experts, the file 1: are they of another model?",
    ),
    Case(
        "loads of a model with more experts",
        _PLAN + "--loads=load.json",
        given=_loads(*(_record(_LAYER.replace("en", side), [5] * 16) for side in ("en", "de"))),
        error=f"--loads=load.json has loads of 16 experts in {_LAYER}, where "
        "translation.quickstart has 8: expected the loads of the same model",
    ),
    Case(
        "loads for a model without experts",
        "gshard-plan --experiment=test.tiny --topology=cpu:1 --loads=load.json",
        given=_loads(_record(_LAYER, [10] * 8)),
        error="--loads=load.json: test.tiny has no layer with experts",
    ),
    Case(
        "more copies than places",
        _PLAN + "--loads=load.json --replicas=25",
        given=_loads(*(_record(_LAYER.replace("en", side), [10] * 8) for side in ("en", "de"))),
        says="...gshard-plan: error: --replicas=25: the 8 experts of "
        f"{_LAYER} are divided over 4 devices; expected at most 24, which is every expert on every "
        "device\n",
        code=1,
        slow=True,
    ),
    Case(
        "replicas without loads",
        _PLAN + "--replicas=8",
        error="--replicas=8 applies to --loads, which is not given",
    ),
    Case(
        "a negative number of copies",
        _PLAN + "--loads=load.json --replicas=-1",
        error="--replicas=-1: -1 is not a non-negative integer",
    ),
    Case(
        "loads for a search",
        _PLAN + "--loads=load.json --search",
        error="--loads=load.json does not apply to --search=True: it is for the training step of "
        "an experiment",
    ),
    Case(
        "experts placed without a plan",
        "gshard-experts place --logdir=run --output=new",
        given=(trained("run", "translation"),),
        error="--plan is missing: the file that gshard-plan --loads --json wrote",
    ),
    Case(
        "experts placed by something else",
        "gshard-experts place --logdir=run --output=new --plan=load.json",
        given=(trained("run", "translation"), *_loads(_record(_LAYER, [10] * 8))),
        error="load.json: not a plan: Expected `object`, got `array`",
    ),
)
