# tests: tools/doctor.py, tools/diagnosis/environment.py, tools/diagnosis/speed.py
"""gshard-doctor: each check finds what is right, and what was made wrong for the test."""

import importlib.metadata
import json

import jax
import numpy as np
import pytest

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.tools import doctor
from lingvo_gshard.tools.diagnosis import environment, speed
from lingvo_gshard.tools.diagnosis.accelerator.trials import Machine
from lingvo_gshard.tools.diagnosis.environment import Check, State
from lingvo_gshard.wings.planning.machines import chips
from lingvo_gshard.wings.services import run_records

COLLECTIVES = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


def states(checks):
    return {check.name: check.state for check in checks}


def test_the_tested_versions_are_those_of_the_constraints():
    assert environment.tested_versions()["jax"] == "0.10.2"


def test_another_version_is_a_warning_and_an_old_or_missing_one_a_failure(monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name == "rich":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"jax": "0.4.1", "numpy": "9.0"}.get(name) or installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {check.name: check for check in environment.check_versions()}
    assert found["numpy"].state == State.WARNING and "was tested" in found["numpy"].found
    assert found["jax"].state == State.FAILURE and "is required" in found["jax"].found
    assert found["jax"].advice == "pip install 'jax==0.10.2'"
    assert found["rich"].found == "not installed"


def test_settings_of_the_environment():
    given = {
        "JAX_DISABLE_JIT": "1",
        "JAX_ENABLE_X64": "0",
        "XLA_FLAGS": "--xla_dump_to=/tmp/x --xla_cpu_multi_thread_eigen=true",
        "HOME": "/root",
    }
    found = list(environment.check_environment(given))
    assert [check.state for check in found] == [
        State.FAILURE,
        State.OK,
        State.WARNING,
        State.OK,
    ]
    assert "--xla_dump_to=/tmp/x" in found[2].found
    (none,) = environment.check_environment({"HOME": "/root"})
    assert none.found.startswith("no setting")


def test_the_environment_is_that_of_the_start(monkeypatch):
    monkeypatch.setenv("JAX_SET_LATER", "1")
    assert "JAX_SET_LATER" not in run_records.environment_at_start()
    assert "PATH" in run_records.environment_at_start()


def test_memory_of_a_container_counts(monkeypatch, tmp_path):
    free = speed.available_memory()
    limit = tmp_path / "memory.max"
    limit.write_text("1073741824\n")
    monkeypatch.setattr(speed, "_CGROUP", limit)
    assert speed.available_memory() == min(free, 2**30)
    found = {check.name: check for check in speed.check_host(str(tmp_path / "runs" / "new"))}
    assert found["memory"].state == State.FAILURE and found["memory"].advice
    assert str(tmp_path / "runs" / "new") in found["disk: runs"].found


def test_an_accelerator_that_jax_does_not_see_is_named(monkeypatch, tmp_path):
    (driver := tmp_path / "nvidia0").touch()
    monkeypatch.setattr(speed, "_DRIVERS", {str(driver): ("a GPU", "pip install jax=={version}")})
    *_, check = speed.check_devices(devices_for(2))
    assert check.state == State.WARNING
    assert check.advice == f"pip install jax=={jax.__version__}"


def test_a_wrong_product_is_found(monkeypatch):
    monkeypatch.setitem(speed._SIZES, "cpu", 64)
    machine = Machine(devices_for(1))
    assert speed.check_product(machine).state == State.OK
    compiled = jax.jit
    flipped = lambda function: compiled(lambda a, b: function(a, b).at[0, 3].multiply(2.0**20))  # noqa: E731
    monkeypatch.setattr(jax, "jit", flipped)
    check = speed.check_product(machine)
    assert check.state == State.FAILURE and "wrong results" in check.advice


def test_a_product_far_below_the_published_rate_is_a_warning(monkeypatch):
    monkeypatch.setitem(speed._SIZES, "cpu", 64)
    monkeypatch.setattr(chips, "of_device", lambda *_: chips.get("h100"))
    check = speed.check_product(Machine(devices_for(1)))
    assert check.state == State.WARNING
    assert check.timing.planned == pytest.approx(2 * 64**3 / (0.653 * 494.5e12))
    assert check.timing.point.startswith('"product_efficiency": {64: 0.')


def test_collectives_equal_numpy_and_a_lost_message_is_found(monkeypatch):
    monkeypatch.setitem(speed._NUMBERS, "cpu", 64)
    machine = Machine(devices_for(4))
    assert states(speed.check_collectives(machine)) == dict.fromkeys(COLLECTIVES, State.OK)
    summed = jax.lax.psum
    losing = lambda x, axis_name: summed(  # noqa: E731
        x * (jax.lax.axis_index(axis_name) != 2), axis_name
    )
    monkeypatch.setattr(jax.lax, "psum", losing)
    found = states(speed.check_collectives(machine))
    assert found["all-reduce"] == State.FAILURE
    assert found["all-to-all"] == State.OK
    (alone,) = speed.check_collectives(machine.first())
    assert alone.found == "one device needs none"


@pytest.mark.slow
def test_a_sharded_step_equals_one_device_and_another_batch_does_not(monkeypatch):
    assert speed.check_step(devices_for(2)).state == State.OK
    train = SpmdRuntime.train_step

    def on_turned_rows(runtime, batch):
        return train(runtime, batch | {"x": np.roll(batch["x"], 1, 0)})

    monkeypatch.setattr(SpmdRuntime, "train_step", on_turned_rows)
    check = speed.check_step(devices_for(2))
    assert check.state == State.FAILURE and "differs by" in check.found


def test_the_exit_code_is_1_only_after_a_failure(monkeypatch, tmp_path, capsys):
    file = tmp_path / "health.json"
    for state, code in ((State.WARNING, 0), (State.FAILURE, 1)):
        found = [Check("disk", state, "[1] GiB", "more"), Check("x", State.OK, "y")]
        monkeypatch.setattr(doctor, "_checks", lambda *_, found=found: iter(found))
        assert doctor.main(["gshard-doctor", f"--json={file}"]) == code
        record = {"name": "disk", "state": state.value, "found": "[1] GiB", "advice": "more"}
        record["timing"] = None
        assert json.loads(file.read_text())["checks"][0] == record
    printed = capsys.readouterr().out
    assert "[1] GiB" in printed and "1 ok, 0 warnings, 1 failures" in printed


@pytest.mark.slow
def test_this_machine_is_well(tmp_path):
    file = tmp_path / "health.json"
    assert doctor.main(["gshard-doctor", "--devices=4", f"--json={file}"]) == 0
    names = [check["name"] for check in json.loads(file.read_text())["checks"]]
    assert {"packages", "memory", "product", *COLLECTIVES, "sharded step"} <= set(names)
