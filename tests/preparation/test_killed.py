# tests: wings/preparation/job.py, wings/preparation/pool.py, wings/preparation/pipeline.py
# tests: wings/preparation/row_files.py
"""Tests that a killed preparation goes on, and that nothing is lost or doubled."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_gshard.data import held_out
from lingvo_gshard.data.sources.row import Row
from tests.preparation import raw

# The default of the setting held_out_per_mille.
PER_MILLE = 10


def _start(directory, output):
    command = [sys.executable, "-m", "tests.preparation.killed_run", str(directory), output]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_kill_9_at_random_moments_loses_and_doubles_nothing(tmp_path):
    draw = np.random.default_rng(0)
    rows = raw.rows(6000)
    for part in range(6):
        raw.write_tsv(tmp_path / f"{part}.tsv", rows[part * 1000 :] + rows[:200])
    started = time.monotonic()
    process = _start(tmp_path, "whole")
    assert process.wait() == 0, process.stderr.read()
    seconds = time.monotonic() - started
    kills = 0
    while kills < 20:
        process = _start(tmp_path, "killed")
        try:
            # Each run goes on where the one before was, so that the moments cover all stages.
            process.wait(draw.uniform(0.3, 1.0) * seconds / 2)
        except subprocess.TimeoutExpired:
            victim = os.killpg if kills % 2 else os.kill
            victim(process.pid, signal.SIGKILL)
            kills += 1
            process.wait()
            continue
        assert process.returncode == 0, process.stderr.read()
        if kills < 20:
            assert raw.digests(tmp_path / "killed") == raw.digests(tmp_path / "whole")
            subprocess.run(["rm", "-r", str(tmp_path / "killed")], check=True)
    process = _start(tmp_path, "killed")
    assert process.wait() == 0, process.stderr.read()
    assert raw.digests(tmp_path / "killed") == raw.digests(tmp_path / "whole")
    divided = held_out.divide([Row(*row) for row in rows], PER_MILLE)
    expected = ((split, *row[:3]) for split, kept in divided.rows.items() for row in kept)
    assert raw.texts(tmp_path / "killed") == sorted(expected)
