# tests: tools/benchmarks/card/fill.py, tools/benchmarks/card/folder.py
"""Tests how a step that fills a card is chosen and written."""

import json
import os
import subprocess
import sys

import pytest

from lingvo_gshard.tools import bench
from lingvo_gshard.tools.benchmarks.card import folder
from lingvo_gshard.tools.benchmarks.card.fill import largest
from lingvo_gshard.tools.console import startup
from lingvo_gshard.wings.planning.machines import cuda
from lingvo_gshard.wings.planning.plan import plan
from lingvo_gshard.wings.saved_programs import program_file

TINY = [
    *("task.model_dim = 8", "task.decoder.num_heads = 2", "task.decoder.hidden_dim = 16"),
    *("task.decoder.num_layers = 1", "task.decoder.layer.self_attention.head_dim = 4"),
    *("input.length = 8", "input.batch_rows = 2", "input.vocabulary.size = 32"),
]


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Returns (exit code, standard output, standard error)."""
    code = startup.guarded(bench.NAME, bench.main)([bench.NAME, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("first", [1, 4, 37, 100])
@pytest.mark.parametrize(("base", "each"), [(10, 7), (0, 20), (930, 30), (600, 399), (999, 500)])
def test_largest_is_what_counting_up_finds(first, base, each):
    """Sizes grow by a constant, and a little more for odd numbers."""
    asked = []

    def bytes_of(number):
        asked.append(number)
        return base + each * number + number % 2

    counted = max((n for n in range(1, 2000) if base + each * n + n % 2 <= 1000), default=0)
    assert largest(bytes_of, 1000, first, 50) == counted
    assert len(asked) == len(set(asked)) and len(asked) <= 12


def test_largest_of_few_compilations_is_known_to_fit():
    assert largest(lambda n: n * n, 10_000, 1, 3) ** 2 <= 10_000
    assert largest(lambda n: 10 + n, 5, 1, 8) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "fill needs --folder, such as --topology=gpu:h100:1x1 --folder=dense"),
        (["--folder=x"], "fill needs --topology"),
        (["--folder=x", "--topology=cpu:1"], "fill needs an experiment, such as --experiment=lang"),
        (
            ["--folder=x", "--topology=gpu:h10:1x1"],
            "fill needs an experiment",
        ),
        (
            ["--folder=x", "--topology=gpu:h10:1x1", "--experiment=language_model.one_gpu_dense"],
            "unknown",
        ),
        (
            [
                *("--folder=x", "--topology=cpu:1", "--experiment=language_model.one_gpu_dense"),
                "--grow=task.decoder.num_layer",
            ],
            "--grow=task.decoder.num_layer: ",
        ),
        (
            [
                *("--folder=x", "--topology=cpu:1", "--experiment=language_model.one_gpu_dense"),
                "--grow=step.precision",
            ],
            "--grow=step.precision is 'bfloat16' in language_model.one_gpu_dense; expected a",
        ),
        (["--share=1.5"], "share"),
    ],
)
def test_user_errors_are_one_line(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "fill", *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("gshard-bench: error: ") and err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "x").exists()


def test_flags_of_fill_are_refused_elsewhere(capsys):
    code, _, err = run(capsys, "card", "folder", "--share=0.5")
    assert code == 1 and "--share=0.5 applies to `fill`, not to `card`" in err


@pytest.mark.slow
def test_the_largest_step_that_fits_is_written_with_its_plan(capsys, tmp_path):
    memory = 0.0008
    settings = [f"--gin_param={setting}" for setting in TINY]
    code, out, err = run(
        capsys,
        "fill",
        *("--experiment=language_model.one_gpu_experts", "--topology=cpu:1"),
        *(f"--folder={tmp_path}", f"--memory_gib={memory}", *settings, "--json"),
        "--gin_param=task.decoder.moe.group_size = 8",
        "--gin_param=task.decoder.layer.self_attention.num_key_value_heads = 1",
    )
    assert code == 0, err
    (row,) = json.loads(out)["rows"]
    read = folder.read(str(tmp_path))
    assert read.card.value == row["value"] >= 1
    capacity = 0.9 * memory * 2**30
    assert read.plan.bytes_per_device.peak <= capacity
    record, _, _ = program_file.read(read.step)
    assert record.platforms == ("cpu", "cuda", "rocm", "tpu")
    kinds = dict(record.layers.kinds)
    assert kinds["decoder/layers/body_0/self_attention"] == "attention"
    assert {row.kind for row in read.plan.kinds} >= {"attention", "products", "optimizer"}
    assert plan.load(tmp_path / folder.PLAN).name == "language_model.one_gpu_experts"

    code, _, err = run(
        capsys,
        "fill",
        *("--experiment=language_model.one_gpu_dense", "--topology=cpu:1"),
        *(f"--folder={tmp_path}", "--memory_gib=0.00001", *settings),
    )
    assert code == 1
    assert "a step with task.decoder.num_layers = 1 needs" in err


@pytest.mark.slow
@pytest.mark.skipif(cuda.installed() is None, reason=cuda.MISSING)
def test_a_gpu_is_filled_by_its_own_compiler(tmp_path):
    """A process of its own: jax must not have started without the compiler."""
    settings = [f"--gin_param={setting}" for setting in TINY]
    flags = ["--topology=gpu:l4:1x1", "--folder=dense", "--memory_gib=0.0046", *settings]
    command = [sys.executable, "-m", "lingvo_gshard", "bench", "fill", *flags]
    done = subprocess.run(
        [*command, "--experiment=language_model.one_gpu_dense"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    read = folder.read(str(tmp_path / "dense"))
    assert read.plan.compiler == "gpu" and read.plan.chip == "NVIDIA L4"
    assert read.card.options == {cuda.MEMORY_LIMIT: str(cuda.ALL_MEMORY)}
    assert read.plan.bytes_per_device.peak <= 0.9 * read.card.memory
