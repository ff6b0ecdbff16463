# tests: wings/saved_programs/program_file.py, runtime/program/step_programs.py
"""Tests the useful work that a saved program records."""

import json
import zipfile

from lingvo_gshard.runtime.program.program import Program, Work
from lingvo_gshard.runtime.program.step_programs import train_program
from lingvo_gshard.sharding.partitioning import Partitioning
from tests import tiny


def test_saved_program_keeps_the_work_of_any_task(tmp_path):
    params = tiny.experiment_params()
    trainer = params.step.instantiate(params.task, params.run.steps)
    specs = params.input.cls.batch_specs(params.input)
    program, _ = train_program(trainer, Partitioning.make("data=1", "data"), "gspmd", specs)
    flops = 3 * 2 * 16 * (tiny.INPUTS + tiny.CLASSES) * tiny.HIDDEN
    assert program.work == Work(flops, 16, (("batch.y", tiny.CLASSES),))
    path = tmp_path / "step.zip"
    program.save(path)
    assert Program.load(path) == program
    with zipfile.ZipFile(path) as file:
        record = json.loads(file.read("program.json"))
    assert record["work"] == {
        "flops": flops,
        "tokens": 16,
        "vocabularies": [["batch.y", tiny.CLASSES]],
    }
