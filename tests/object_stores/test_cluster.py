# tests: wings/object_stores/checkpoints.py, wings/object_stores/synced_folder.py
# tests: training/run/checkpoint/store.py
"""Tests that two processes train in one bucket, each writing its shards, and go on there."""

import pytest

from lingvo_gshard.core.files import objects
from tests.tools import tiny_translation
from tests.tools.train.train_processes import train_in_two


@pytest.mark.slow
def test_two_processes_train_and_go_on(emulator, folder, tmp_path):
    # Processes get the emulator's settings from the fixture.
    flags = tiny_translation.write(tmp_path, input__batch_rows=8)
    flags += ["--runtime=spmd", "--mesh=data=8", "--strategy=expert", f"--logdir={folder}"]
    train_in_two([*flags, "--steps=4"])
    main, _ = train_in_two([*flags, "--steps=6"])
    assert "Resuming from the checkpoint of step 4" in main
    assert objects.names(f"{folder}/checkpoints") == ["4", "6"]
    # Each process has written arrays.
    written = objects.find(f"{folder}/checkpoints/6/theta")
    assert {"ocdbt.process_0/manifest.ocdbt", "ocdbt.process_1/manifest.ocdbt"} <= set(written)
    assert objects.read_bytes(f"{folder}/metrics.jsonl").count(b"\n") == 6
