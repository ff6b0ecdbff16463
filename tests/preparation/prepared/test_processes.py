# tests: wings/preparation/prepared/base_input.py, wings/preparation/prepared/table.py
"""Tests that processes which read their own rows alone train as one process does."""

import json

import pytest

from lingvo_gshard.training.run.monitoring.metrics import BATCH_DIGEST, METRICS_FILE
from tests.preparation.prepared import corpora
from tests.tools.train.train_processes import finish, start, train_in_two

_SETTINGS = {
    "input.batch_rows": 8,
    "input.source_length": 48,
    "input.target_length": 28,
    "input.packing_window": 200,
    "task.model_dim": 16,
    "task.encoder.num_layers": 1,
    "task.decoder.num_layers": 1,
    "task.encoder.num_heads": 2,
    "task.decoder.num_heads": 2,
    "task.encoder.hidden_dim": 32,
    "task.decoder.hidden_dim": 32,
    "run.log_every_steps": 1,
}


def digests_and_losses(logdir):
    rows = [json.loads(line) for line in (logdir / METRICS_FILE).read_text().splitlines()]
    return [row[BATCH_DIGEST] for row in rows], [row["loss"] for row in rows]


@pytest.mark.slow
def test_two_processes_read_like_one_and_one_goes_on(tmp_path):
    corpora.prepare(tmp_path / "prepared")
    settings = {**_SETTINGS, "input.directory": str(tmp_path / "prepared")}
    flags = [f"--gin_param={name} = {value!r}" for name, value in settings.items()]
    flags += ["--experiment=translation.large", "--mesh=data=8"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    finish(start([*flags, f"--logdir={alone}", "--steps=6"], devices=8))
    train_in_two([*flags, f"--logdir={together}", "--steps=4"])
    finish(start([*flags, f"--logdir={together}", "--steps=6"], devices=8))
    (expected, losses), (found, other) = map(digests_and_losses, (alone, together))
    assert found == expected and len(set(found)) == 6
    assert other == pytest.approx(losses, rel=1e-5)
