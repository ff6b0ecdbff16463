# tests: wings/services/run_records.py, wings/services/memory.py, wings/services/runtime.py
"""Checks what a run records about itself: launches, sharding, evaluations, memory."""

import json
import os
import resource
import shlex
import sys
import types

import pytest

from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training import experiments
from lingvo_gshard.wings.services import memory, run_records
from tests import tiny


def a_launch(**fields):
    given = {
        "time": 1.5e9,
        "step": 0,
        "steps": 12,
        "experiment": "test.tiny",
        "command": "gshard-train --experiment=test.tiny",
        "directory": "/home/a",
        "host": "a",
        "processes": 1,
        "runtime": "local",
        "devices": "1 CPU",
        "parameters": 10,
        "active_parameters": 5,
        "versions": {"python": "3.11"},
        "environment": {},
    }
    return run_records.Launch(**given | fields)


def test_each_launch_is_a_row_and_damaged_rows_are_left_out(tmp_path):
    assert run_records.read_launches(tmp_path) == []
    rows = [a_launch(), a_launch(step=8)]
    run_records.append_launch(tmp_path, rows[0])
    with open(tmp_path / run_records.LAUNCHES_FILE, "ab") as file:
        file.write(b'{"time": 1, "step"\n\xff\n')
    run_records.append_launch(tmp_path, rows[1])
    assert run_records.read_launches(tmp_path) == rows


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["/a/python3", "/a/bin/gshard-train", "--logdir=a b"], "gshard-train '--logdir=a b'"),
        (["/a/python", "-m", "lingvo_gshard", "train"], "python -m lingvo_gshard train"),
        (["python", "mine.py", "$x"], "python mine.py '$x'"),
        (["python"], "python"),
        (["gshard", "a = 'b'", "it's $1"], """gshard "a = 'b'" 'it'"'"'s $1'"""),
    ],
)
def test_the_command_is_what_was_typed(monkeypatch, typed, expected):
    monkeypatch.setattr(sys, "orig_argv", typed)
    assert run_records.command_line() == expected
    arguments = shlex.split(expected)[1:]
    assert arguments == typed[len(typed) - len(arguments) :]


def test_settings_have_no_variables_of_other_programs():
    given = {"TF_VAR_password": "secret", "HOME": "/root", "XLA_FLAGS": "-a", "TF_XLA_FLAGS": "b"}
    assert run_records.settings(given) == {"TF_XLA_FLAGS": "b", "XLA_FLAGS": "-a"}


def test_versions_have_what_computes():
    assert {
        "python",
        "lingvo_gshard",
        "tensorflow",
        "jax",
        "numpy",
    } <= run_records.versions().keys()


def test_sharding_lists_weights_and_moments_with_the_bytes_of_a_device(tmp_path):
    assert run_records.read_sharding(tmp_path) is None
    trainer = experiments.make_trainer(tiny.experiment_params())
    split = Partitioning.make("data=2,model=2", "data_tensor_fsdp")
    for partitioning in (None, split):
        found = run_records.trainer_sharding(trainer, partitioning)
        run_records.write_sharding(tmp_path, found)
        assert run_records.read_sharding(tmp_path) == found
        assert {row.kind for row in found.tensors} == {"weights", "moments"}
        for row in found.tensors:
            parts = row.bytes / row.bytes_per_device
            assert parts in ((1,) if partitioning is None else (1, 2, 4))
            assert (row.split == "replicated") == (parts == 1)
    assert (found.mesh, found.devices, found.strategy) == ("data=2,model=2", 4, "data_tensor_fsdp")
    assert any(row.bytes > row.bytes_per_device for row in found.tensors)
    (tmp_path / run_records.SHARDING_FILE).write_bytes(b"{")
    assert run_records.read_sharding(tmp_path) is None


def test_memory_is_that_of_the_process_and_of_its_devices():
    runtime = types.SimpleNamespace(peak_device_memory=lambda: None)
    row = memory.memory_metrics(runtime)
    # The kernel counts the largest resident set in KiB.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 0 < row.pop("host_memory_bytes") <= most * 1.01
    assert row == {}
    runtime.peak_device_memory = lambda: 7
    assert memory.memory_metrics(runtime)["peak_device_memory_bytes"] == 7.0


def test_evaluations_are_rows(tmp_path):
    row = run_records.EvaluationRow(1.0, 12, "dev", "trained", "3 rows", {"a": [1]}, {"loss": 2.0})
    run_records.append_evaluation(tmp_path, row)
    assert run_records.read_evaluations(tmp_path) == [row]
    (line,) = (tmp_path / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["scores"] == {"loss": 2.0}


def test_rows_of_an_unreadable_file_are_none(tmp_path):
    assert run_records.read_rows(tmp_path, dict) == []
    assert run_records.read_rows(tmp_path / os.fsdecode(b"no"), dict) == []
