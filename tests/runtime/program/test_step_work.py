"""The useful work of a step, as it stands in a saved program."""

import dataclasses
import json
import zipfile

import tensorflow as tf

from lingvo_gshard.runtime.program.program import Program, Work
from lingvo_gshard.runtime.program.step_programs import train_program
from lingvo_gshard.runtime.program.step_work import work_of_step
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training import flops
from tests import tiny
from tests.runtime import tiny_translation

IDS = ("batch.source_ids", "batch.target_inputs", "batch.target_labels")


def test_a_translation_step_counts_both_sides():
    task = tiny_translation.trainer().task
    batch = tiny_translation.batch(0)
    specs = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in batch.items()}
    rows, length = batch["source_ids"].shape
    operations = flops.translation_step(task, rows, length, length)
    ids = tuple((name, 32) for name in IDS)
    assert work_of_step(task, specs) == Work(operations, 2 * rows * length, ids)


def test_a_file_keeps_it_and_a_task_that_nobody_counts_has_none(tmp_path):
    params = tiny.experiment_params()
    trainer = params.trainer.instantiate(params.task.instantiate())
    specs = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in tiny.make_batch(1, 0).items()}
    program, _ = train_program(trainer, Partitioning.make("data=1", "data"), "gspmd", specs)
    assert program.work is None
    work = Work(10**20, 7, (("batch.x", 3), ("batch.y", 5)))
    counted = dataclasses.replace(program, work=work)
    for each in (program, counted):
        path = tmp_path / "step.zip"
        each.save(path)
        assert Program.load(path) == each
    with zipfile.ZipFile(path) as file:
        record = json.loads(file.read("program.json"))
    assert record["work"] == {
        "flops": 10**20,
        "tokens": 7,
        "vocabularies": {"batch.x": 3, "batch.y": 5},
    }
    assert counted.digest == program.digest
