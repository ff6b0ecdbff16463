# tests: wings/open_models/shards.py, wings/open_models/importing.py, wings/open_models/exporting.py
"""Tests that import and export need memory for a tensor and not for a model.

    LARGE_MODEL_MB=2148 python -m pytest -m slow -s tests/open_models/test_memory.py

also prints the times beside that of a copy of the files.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.families import llama
from lingvo_gshard.wings.open_models.importing import weight_specs
from lingvo_gshard.wings.open_models.shards import Tensor, plan_files, write_file, write_index
from lingvo_gshard.wings.open_models.weight_mapping import WeightMapping
from tests.open_models.published import CONFIG, write_tokenizer

MEGABYTE, GIBIBYTE = 10**6, 2**30
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
# Runs a command and prints its peak memory in kibibytes. What getrusage says is also the parent's.
MEASURED = """
import re, sys
from lingvo_gshard.tools.console import launcher
code = launcher._run(sys.argv[1], ["gshard-" + sys.argv[1], *sys.argv[2:]])
with open("/proc/self/status") as status:
    print("peak", re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1])
sys.exit(code)
"""


def write_model(directory: pathlib.Path, megabytes: int) -> list[Tensor]:
    """Writes a random bfloat16 Llama of about this size, and returns its tensors."""
    directory.mkdir()
    config = CONFIG | SIZES | {"torch_dtype": "bfloat16"}
    config["num_hidden_layers"] = max(round((megabytes - 262) / 121.6), 1)
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    specs = weight_specs(experiment_of(PublishedConfig.load(directory)))
    pieces = WeightMapping.of(llama.FAMILY.table, specs).pieces
    tensors = [Tensor(name, found[0].published_shape, "BF16") for name, found in pieces.items()]
    rng = np.random.default_rng(0)
    files = plan_files(tensors, directory, file_bytes=GIBIBYTE)
    for part in files:
        write_file(part, (rng.standard_normal(t.shape, np.float32) * 0.02 for t in part))
    write_index(files, directory)
    return tensors


def run(*command: str) -> tuple[int, float]:
    """Runs a command in a process of its own; returns its peak memory and its seconds."""
    os.sync()
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", MEASURED, *command], capture_output=True, text=True
    )
    os.sync()
    seconds = time.monotonic() - started
    assert result.returncode == 0, result.stderr
    return int(result.stdout.rpartition("peak ")[2]) * 1024, seconds


def copy_seconds(source: pathlib.Path, target: pathlib.Path) -> float:
    """Returns the time in which the files of a model are copied to the disk."""
    os.sync()
    started = time.monotonic()
    target.mkdir()
    for file in source.iterdir():
        # As programs copy that read and write; the kernel's own copy shares pages.
        with open(file, "rb", buffering=0) as read, open(target / file.name, "wb") as written:
            shutil.copyfileobj(read, written, 2**24)
    os.sync()
    seconds = time.monotonic() - started
    shutil.rmtree(target)
    return seconds


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    source, logdir, output = (tmp_path / name for name in ("model", "run", "out"))
    tensors = write_model(source, int(os.environ.get("LARGE_MODEL_MB", 1000)))
    largest = max(tensor.nbytes for tensor in tensors)
    total = sum(tensor.nbytes for tensor in tensors)
    before = copy_seconds(source, tmp_path / "copy")
    types = "--precision=bfloat16_weights"
    imported = run("import", f"--from={source}", f"--logdir={logdir}", types)
    exported = run("export", f"--logdir={logdir}", "--format=huggingface", f"--output={output}")
    # Other programs may keep the machine busy for a while.
    copied = (before + copy_seconds(source, tmp_path / "copy")) / 2
    for name, (peak, seconds) in (("import", imported), ("export", exported)):
        rate = total / seconds / MEGABYTE
        print(
            f"{name}: {total / GIBIBYTE:.2f} GiB, peak {peak / GIBIBYTE:.2f} GiB, {seconds:.1f} s, "
            f"{rate:,.0f} MB/s, {copied / seconds:.0%} of the speed of a copy ({copied:.1f} s)"
        )
        assert peak < 1.5 * largest + GIBIBYTE
    assert sum(file.stat().st_size for file in output.glob("*.safetensors")) >= total
