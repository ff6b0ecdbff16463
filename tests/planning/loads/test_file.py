"""Tests how files of loads are read, and the sentence for each that is wrong."""

import json
import re

import msgspec
import numpy as np
import pytest

from lingvo_gshard.layers.moe import SwitchRouter
from lingvo_gshard.tools.experts import report
from lingvo_gshard.wings.fine_tuning.surgery.expert_use import ExpertUse
from lingvo_gshard.wings.planning.loads import file, rating
from lingvo_gshard.wings.services.routers.counts import watched_layers
from tests.planning import example_plan
from tests.planning.loads.example_loads import LAYER, choose, layer_of, record_of
from tests.runtime import tiny_translation

OTHER = "encoder.layers[1].feed_forward"
RECORDS = [
    record_of(choose(step), step, 6, layer) for step in (5, 10, 15) for layer in (OTHER, LAYER)
]
REPORT = {
    "experiment": "test",
    "step": 15,
    "layers": [
        {"path": path, "all": {"tokens": 90, "load": [30.0, 60.0], "dropped_share": 0.25}}
        for path in (OTHER, LAYER)
    ],
}


def written(tmp_path, content):
    path = tmp_path / "load.json"
    path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
    return str(path)


@pytest.mark.parametrize("kind", ["report", "watched", "routers.jsonl"])
def test_all_files_with_watched_steps_have_the_same_loads(tmp_path, kind):
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in RECORDS)
    # The last line is under way.
    content = {
        "report": {**REPORT, "watched": RECORDS},
        "watched": RECORDS,
        "routers.jsonl": lines + lines[:30],
    }[kind]
    found = file.load(written(tmp_path, content))
    assert found.steps == [5, 10, 15] and not found.is_measured
    assert found.layers == {OTHER: RECORDS[::2], LAYER: RECORDS[1::2]}
    assert file.load(found.path, 7).steps == [10, 15]


def test_a_report_of_a_run_that_was_not_watched_has_the_load_of_its_rows(tmp_path):
    found = file.load(written(tmp_path, {**REPORT, "watched": []}))
    assert found.is_measured and found.steps == [15]
    record = found.layers[LAYER][0]
    assert record.choices == [30, 60] and record.dropped_share == 0.25 and record.tokens == 90


def changed(**fields):
    return [msgspec.structs.replace(RECORDS[0], **fields), *RECORDS[1:]]


NEGATIVE = [-5, *RECORDS[0].choices[1:]]
WRONG = {
    "a plan": (example_plan.example_plan(), "no loads of routers: Object missing required field"),
    "no JSON": (b"loads: even", "not JSON ("),
    "a table of metrics": (b'{"step": 1}\n{"step": 2}\n', "no loads of routers: Object missing"),
    "an empty file": (b"", "not JSON ("),
    "no records": ([], "no layer with experts is in it"),
    "negative loads": (
        changed(choices=NEGATIVE),
        f"{OTHER}, step 5: choices[0] is -5; expected a count, 0 or more",
    ),
    "negative positions": (changed(positions=[1, -1]), "positions[1] is -1"),
    "fewer counts": (changed(kept=[1, 2]), "kept has 2 counts and choices has 8"),
    "no experts": (changed(choices=[]), "choices is empty"),
    "no tokens": (changed(choices=[0] * 8), "no token chose an expert"),
    "parts of others": (changed(by_part=[[1] * 8]), "by_part does not add up to choices"),
    "a missing step": (RECORDS[1:], "has a record of step 5; expected the same steps"),
    "another number of experts": (
        [*RECORDS, changed(step=20, choices=[1, 1], kept=[1, 1], by_part=[])[0]],
        "has 2 experts in one step and 8 in another",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, name):
    content, expected = WRONG[name]
    path = written(tmp_path, content)
    if name == "another number of experts":
        content = [*content, changed(step=20, layer=LAYER)[0]]
        path = written(tmp_path, content)
    with pytest.raises(ValueError, match=re.escape(expected)) as error:
        file.load(path)
    assert str(error.value).startswith(f"`loads={path}`: ") and "\n" not in str(error.value)


def test_a_missing_file_and_a_step_after_the_last(tmp_path):
    with pytest.raises(ValueError, match=r"^`loads=none\.json`: cannot be read: No such file"):
        file.load("none.json")
    path = written(tmp_path, RECORDS)
    with pytest.raises(ValueError, match=r"^`loads_from=16`: the last step in `loads=.*` is 15;"):
        file.load(path, 16)


def layers_of(router=None, **values):
    """Returns the layers with experts of a model of two layers on each side, or more."""
    stack = {"moe.router": router} if router else {}
    stack |= {"num_layers": values.pop("num_layers")} if "num_layers" in values else {}
    return watched_layers(tiny_translation.trainer(stack_values=stack, **values).task)


def test_loads_of_another_model_name_layer_and_count(tmp_path):
    loads = file.load(written(tmp_path, RECORDS))
    mine = layers_of()
    rating.check_model(loads, mine, "mine")
    with pytest.raises(ValueError) as error:
        rating.check_model(loads, {LAYER: mine[LAYER]}, "mine")
    assert str(error.value) == (
        f"`loads={loads.path}` has loads of {OTHER}, which is no layer with experts of mine. Did "
        f"you mean '{LAYER}'? mine has 1 layer with experts, the file 2: are they of another model?"
    )
    with pytest.raises(ValueError, match=r"has no loads of encoder\.layers\[3\].*has 4 layers"):
        rating.check_model(loads, layers_of(num_layers=4), "mine")
    with pytest.raises(ValueError, match="has loads of 8 experts in .*, where mine has 16: "):
        rating.check_model(loads, layers_of(num_experts=16), "mine")
    with pytest.raises(ValueError, match=r"2 experts per token in .* mine has 1 \(SwitchRouter\)"):
        rating.check_model(loads, layers_of(SwitchRouter.params()), "mine")
    with pytest.raises(ValueError, match="mine has no layer with experts"):
        rating.check_model(loads, {}, "mine")


def test_replicas_have_room():
    rating.check_replicas(24, [layer_of()])
    with pytest.raises(ValueError, match=r"`replicas=25`: the 8 experts .* at most 24, which is"):
        rating.check_replicas(25, [layer_of()])


def test_json_of_the_report_is_what_is_read():
    """The fields that plans read are those that the report writes."""
    use = ExpertUse(np.array([30.0, 60.0]), np.ones(2), 90.0, 200.0, 22.5, None)
    (layer,) = report.to_record({"de": {LAYER: use}})
    assert layer["path"] == LAYER
    found = json.loads(json.dumps(layer["all"]))
    assert REPORT["layers"][1]["all"].items() <= found.items()
