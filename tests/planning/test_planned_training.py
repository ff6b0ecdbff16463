"""Reads the training that a plan or a search describes, and checks the devices it is for."""

import json
import re
import types

import pytest

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.wings.planning.planned_training import load
from tests import tiny
from tests.planning.example_plan import example_plan
from tests.planning.example_search import example_search
from tests.tools.train import tiny_train  # noqa: F401

CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")
H100 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
A100 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "found.json"


def searched_params():
    params = tiny.experiment_params()
    params.step.micro_batches = 2
    params.sharding.set(
        mesh="data=4,model=2",
        strategy="B->data | weights: H->model",
        overrides={"hidden": "H->-"},
        device_order="topology",
        partitioner="shardy",
        compile_options=("xla_a=True", "xla_b=1"),
    )
    return params


def test_params_of_a_search_are_read_back(path):
    params = searched_params()
    path.write_text(example_search(params, "cpu:8").to_json())
    found = load(path)
    assert found.params.to_text() == params.to_text() and found.params == params
    assert (found.name, found.devices, found.plan) == ("test.tiny", 8, None)
    assert str(found) == str(path)
    assert experiment(plan=path) == params
    changed = experiment("test.tiny", ["run.steps = 5"], plan=path)
    assert changed.run.steps == 5 and changed.sharding == params.sharding
    with pytest.raises(ValueError, match=r"^`plan=.*` is of the experiment test.tiny, not"):
        experiment("translation.quickstart", plan=path)


def test_params_of_a_plan_are_read_back(path):
    params = searched_params()
    changes = {"name": "test.tiny", "topology": "cpu:8", "params": params.to_text()}
    path.write_text(json.dumps(example_plan() | changes))
    found = load(path)
    assert found.params == params and found.topology.name == "cpu:8"
    assert found.plan.mesh == "data=512"


def record_of(**changes):
    return json.loads(example_search(searched_params(), "cpu:8").to_json()) | changes


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        ("", "not JSON (Input data was truncated). Expected a file written by gshard-plan --json"),
        ("[]", "neither a plan nor a search: Expected `object`, got `array`"),
        ({"days": 3}, "neither a plan nor a search; gshard-plan --json writes both"),
        ({"search_format": 9}, "search format 9, but this version reads format 1. Search again"),
        ({"format": 9}, "plan format 9, but this version reads format 2. Plan again"),
        ({"search_format": 1}, "neither a plan nor a search: Object missing required field `name`"),
        (record_of(later=1), "neither a plan nor a search: Object contains unknown field `later`"),
        (record_of(best=None, params=""), "no candidate of the search fits cpu:8. Search with"),
        (record_of(params="x"), "its Params cannot be read: line 1: 'x' is not 'path : value'"),
        (record_of(topology="cpu:4"), "its mesh data=4,model=2 has 8 devices, but cpu:4 has 4."),
        (record_of(topology="cpu"), "`topology=cpu`: "),
        (record_of(name="another"), "a plan of another with the Params of test.tiny. Plan again"),
        (example_plan(), "has no Params to train: it is a plan of gshard_paper.moe_512e_12l that"),
        (example_plan() | {"layers": [1]}, "not a plan: Expected `object`, got `int` - at"),
    ],
)
def test_files_that_describe_no_training(path, content, reason):
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match="^" + re.escape(f"`plan={path}`: {reason}")):
        load(path)


@pytest.mark.parametrize(
    ("topology", "device", "platforms", "is_refused"),
    [
        ("cpu:8", CPU, "", False),
        ("gpu:h100:1x8", CPU, "", True),
        ("gpu:h100:1x8", CPU, "cpu", False),
        ("gpu:h100:1x8", H100, "", False),
        ("gpu:h100:1x8", A100, "", False),
    ],
)
def test_accelerators_are_not_replaced_by_cpus(
    path, monkeypatch, topology, device, platforms, is_refused
):
    path.write_text(example_search(searched_params(), topology).to_json())
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    found = load(path)
    if is_refused:
        with pytest.raises(ValueError, match=f"is for 8 devices of {topology}, but"):
            found.check_devices([device] * 8)
    else:
        found.check_devices([device] * 8)


@pytest.mark.parametrize(
    ("topology", "device", "note"),
    [
        ("cpu:8", CPU, ""),
        ("gpu:h100:1x8", H100, ""),
        ("gpu:h100:1x8", A100, "Warning: planned for .*H100.*, but these devices are NVIDIA A100"),
        ("gpu:h100:1x8", CPU, "Warning: planned for .*H100.*, but these devices are cpu: memory"),
    ],
)
def test_other_chips_than_planned_are_told(path, topology, device, note):
    path.write_text(example_search(searched_params(), topology).to_json())
    found = load(path).note(device)
    assert re.match(note, found) and bool(found) == bool(note)
