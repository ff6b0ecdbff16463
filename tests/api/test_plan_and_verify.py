# tests: api/planning.py, api/partitioning.py, wings/planning/plan/plan.py
"""Tests the arguments of plan and verify, and what a printed plan shows."""

import inspect
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard as gshard
from lingvo_gshard.core import UserError
from lingvo_gshard.wings.planning.machines import compilers


def double(x):
    return x * 2.0


SPEC = tf.TensorSpec([8, 4], tf.float32)


@pytest.mark.parametrize("function", [gshard.plan, gshard.verify])
def test_each_argument_has_a_name_and_a_type(function):
    parameters = inspect.signature(function).parameters.values()
    assert not [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert all(p.annotation is not p.empty for p in parameters)
    for parameter in parameters:
        name = rf"^      (\w+, )*{parameter.name}(, \w+)*: "
        assert re.search(name, function.__doc__, re.MULTILINE), parameter


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((double, [SPEC], "cpu:2"), {"calibration": "a.json"}, "does not apply to a function of T"),
        ((double, [SPEC]), {}, "`topology` is missing: the machine, such as 'v3:32x32'"),
        (("no.zip", [SPEC], "cpu:2"), {}, "does not apply to a jax program or a file"),
        (
            ("no.zip", "cpu:2"),
            {"layouts": []},
            "`layouts=[]` does not apply to a jax program or a file",
        ),
        ((gshard.experiment("translation.quickstart"),), {}, "`topology` is missing"),
        (
            (gshard.experiment("translation.quickstart"), "cpu:2"),
            {"weights": "w"},
            "`weights=w` does not apply to an experiment; expected mesh, strategy, device_order",
        ),
    ],
)
def test_what_does_not_fit_a_plan_is_named(arguments, options, words):
    with pytest.raises(UserError, match=re.escape(words)):
        gshard.plan(*arguments, **options)


@pytest.mark.parametrize(
    "call",
    [
        lambda name, folder: gshard.plan(name, "cpu:2"),
        lambda name, folder: gshard.train(name, folder / "run"),
        lambda name, folder: gshard.describe(name, "capacity"),
    ],
)
def test_the_name_of_an_experiment_is_answered_with_its_params(call, tmp_path):
    expected = "gshard.experiment('translation.quickstart') returns the Params"
    with pytest.raises(UserError, match=re.escape(expected)):
        call("translation.quickstart", tmp_path)
    assert not list(tmp_path.iterdir())


def test_one_setting_needs_no_list():
    one = gshard.experiment("translation.quickstart", "run.steps = 7")
    assert one == gshard.experiment("translation.quickstart", ["run.steps = 7"])
    assert one.run.steps == 7


@pytest.mark.parametrize("plan", [gshard.plan, gshard.plan_generation])
def test_a_missing_compiler_is_told_before_the_wait(plan, monkeypatch):
    """The mesh is refused after the warning, so that nothing is compiled here."""
    monkeypatch.setattr(compilers, "installed", lambda: None)
    experiment = gshard.experiment("language_model.quickstart")
    words = re.escape(compilers.INSTALL)
    with pytest.warns(UserWarning, match=words), pytest.raises(UserError, match="mesh=data=3"):
        plan(experiment, "v3:2x2", mesh="data=3")
    with warnings.catch_warnings(action="error"), pytest.raises(UserError, match="mesh=data=3"):
        plan(experiment, "cpu:2", mesh="data=3")


@pytest.mark.parametrize(
    ("subject", "options", "words"),
    [
        (double, {"mesh": "data=2"}, "`arguments` is missing, which a function needs"),
        (double, {"arguments": [np.ones(2)]}, "`mesh` is missing, which a function needs"),
        (double, {"shrink": False}, "`shrink` does not apply to a function"),
        (
            gshard.experiment("translation.quickstart"),
            {"layouts": []},
            "`layouts` does not apply to an experiment",
        ),
    ],
)
def test_what_does_not_fit_a_verification_is_named(subject, options, words):
    with pytest.raises(UserError, match=re.escape(words)):
        gshard.verify(subject, **options)


def test_a_printed_plan_is_a_table():
    plan = gshard.plan(double, [SPEC], "cpu:2", mesh="data=2", strategy="data")
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in str(plan).splitlines())
    assert rows["program"] == "double" and rows["mesh"] == "data=2" and rows["fits"] == "yes"
    assert rows["machine"].startswith("cpu:2: 2 devices") and rows["strategy"] == "data"
    peak, capacity = map(float, re.findall(r"[\d.]+", rows["memory"].replace(",", "")))
    assert 0 <= peak < capacity
    assert rows["memory"].endswith("GiB a device") and " ms, at least " in rows["step"]
