# tests: wings/open_models/starting.py, wings/open_models/table.py, wings/fine_tuning/starting.py
"""Tests that a run starts with a published model, of which a process reads what it needs."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import rich.console

import lingvo_gshard as gshard
from lingvo_gshard.core import UserError
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.wings.fine_tuning.starting import StartingPoint
from lingvo_gshard.wings.open_models import shards
from lingvo_gshard.wings.open_models.starting import PublishedStart
from lingvo_gshard.wings.open_models.table import Rearrangement
from tests.open_models import published
from tests.open_models.test_both_ways import digests
from tests.tools.train.train_processes import free_port

QUIET = rich.console.Console(quiet=True)
SIZES = {"N": 4, "D": 2, "M": 6, "H": 4, "E": 3}
TRAINING = (
    "input.batch_rows = 2",
    "run.steps = 2",
    "step.schedule.warmup_steps = 1",
)


@pytest.mark.parametrize("least", [0, 40, 4096])
def test_a_part_of_a_tensor_is_read(least, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_LEAST_RUN", least)
    values = np.arange(5 * 4 * 6, dtype=np.float32).reshape(5, 4, 6)
    (tmp_path / "file").write_bytes(b"head" + values.tobytes())
    tensor = shards.Published("name", values.shape, "F32", tmp_path / "file", 4)
    np.testing.assert_array_equal(tensor.read(), values)
    for box in itertools.product([(0, 5), (1, 3)], [(0, 4), (2, 3)], [(0, 6), (1, 5)]):
        found, read = tensor.read_box(box)
        np.testing.assert_array_equal(found, values[tuple(slice(*part) for part in box)])
        assert read >= found.nbytes if least else read == found.nbytes
    scalar = shards.Published("name", (), "F32", tmp_path / "file", 8)
    assert scalar.read().shape == () and scalar.read() == 1
    short = shards.Published("name", (999,), "F32", tmp_path / "file", 4)
    with pytest.raises(ValueError, match="file is damaged or cut off: name lacks bytes"):
        short.read()


@pytest.mark.parametrize(
    "arrangement",
    [
        Rearrangement("(ND)M->MND"),
        Rearrangement("M(ND)->NDM"),
        Rearrangement("EM(Hg)->EMH", (("g", 1, 2),)),
        Rearrangement("(gH)M->MH", (("g", 1, 2),)),
        Rearrangement("(ND)M->MND", (), ("D", 3, 7)),
        Rearrangement("HM->MH", (), ("H", 2, 9)),
        Rearrangement("(ND)gM->MND", (("g", 0, 1),), ("N", 3, 99)),
    ],
    ids=lambda each: f"{each.text} {each.choose}{each.joined}",
)
def test_a_part_of_a_weight_is_that_of_the_whole(arrangement):
    sizes = {letter: SIZES[letter] for letter in arrangement.layout}
    tensor = np.random.default_rng(0).normal(size=arrangement.published_shape(sizes))
    whole, boxes = arrangement.apply(tensor, sizes), []

    def read(box):
        boxes.append(box)
        return tensor[tuple(slice(*part) for part in box)]

    for letter, size in sizes.items():
        wanted = {other: (0, n) for other, n in sizes.items()} | {letter: (1, size - 1)}
        part = arrangement.read_part(read, sizes, wanted)
        expected = whole[tuple(slice(*wanted[each]) for each in arrangement.layout)]
        np.testing.assert_array_equal(part, expected)
        first = any(group.startswith(letter) for group in arrangement._groups)
        counts = np.prod([stop - start for start, stop in boxes[-1]])
        assert counts < tensor.size if first else counts <= tensor.size


def test_the_weights_are_those_of_an_import(tmp_path):
    published.write(tmp_path / "model", shards=2)
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=16)
    expected = dict(gshard.load(tmp_path / "run").model.theta.flatten_items())
    settings = ("task.lora.rank = 2",)
    params = gshard.open_model(tmp_path / "model", length=16, settings=settings)
    trainer = params.step.instantiate(params.task, params.run.steps)
    start = PublishedStart(tmp_path / "model", params, lambda text: None)
    theta = start.checkpoint(trainer, None).theta
    assert {path for path in theta if ".lora." not in path} == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(theta[path], value)
    assert start.bytes_read == sum(np.asarray(value).nbytes for value in expected.values())
    assert (start.extras / "tokenizer.json").exists() and (start.extras / "published.json").exists()
    assert theta.keys() == dict(trainer.theta_specs.flatten_items()).keys()


@pytest.mark.slow
def test_a_run_starts_without_an_import(tmp_path):
    published.write(tmp_path / "model")
    params = gshard.open_model(tmp_path / "model", length=8, settings=TRAINING)
    for name, options in {"local": {}, "spmd": {"mesh": "data=2", "strategy": "fsdp"}}.items():
        logdir = tmp_path / name
        gshard.train(params, logdir, init_from=tmp_path / "model", console=QUIET, **options)
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=8, settings=TRAINING)
    gshard.train(params, tmp_path / "run", console=QUIET)
    losses = [
        [row["loss"] for row in gshard.load(tmp_path / name).metrics()]
        for name in ("run", "local", "spmd")
    ]
    assert losses[0] == losses[1] and losses[0] == pytest.approx(losses[2], rel=1e-5)
    gshard.load(tmp_path / "local").export(tmp_path / "out", "huggingface")
    assert digests(tmp_path / "out").keys() == digests(tmp_path / "model").keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh", "share"),
    [("fsdp", "data=4", 0.5), ("tensor", "model=4", 0.5), ("replicated", "data=4", 1.0)],
)
def test_each_of_two_processes_reads_what_its_devices_hold(strategy, mesh, share, tmp_path):
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    tensors = published.write(tmp_path / "model", sizes=sizes)
    total = sum(value.nbytes for value in tensors.values())
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.open_models.start_process"]
            + [str(tmp_path / "model"), port, str(number), strategy, mesh],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for output in outputs:
        found = json.loads(output.splitlines()[-1])
        # Norms may be whole on every device.
        assert share * total <= found["held"] < (share + 0.01) * total
        assert found["read"] == found["held"]


class SmallLanguageModel(LanguageModelTask):
    """A task of one's own."""


def test_a_run_of_another_task_is_named_and_nothing_is_written(tmp_path):
    published.write(tmp_path / "model")
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=8)
    start = {"init_from": tmp_path / "run", "console": QUIET}
    message = "run` is a run of LanguageModelTask, and the new run is of TranslationTask. Start"
    with pytest.raises(UserError, match=message):
        gshard.train(gshard.experiment("translation.quickstart"), tmp_path / "new", **start)
    assert not (tmp_path / "new").exists()
    for task in (LanguageModelTask, SmallLanguageModel):
        assert StartingPoint(tmp_path / "run", task, print).extras.exists()


@pytest.mark.parametrize("experiment", ["translation.quickstart", "language_model.quickstart"])
def test_a_published_model_needs_its_own_experiment(experiment, tmp_path):
    published.write(tmp_path / "model")
    start = {"init_from": tmp_path / "model", "console": QUIET}
    with pytest.raises(
        UserError, match="model does not fit the experiment; leave `experiment` out"
    ):
        gshard.train(gshard.experiment(experiment), tmp_path / "new", **start)
    assert not (tmp_path / "new").exists()
