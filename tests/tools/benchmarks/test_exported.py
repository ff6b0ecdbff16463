# tests: tools/benchmarks/exported.py, tools/benchmarks/saved.py
"""Runs gshard-bench exported on a tiny step, without TensorFlow: output and errors."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.export
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.progress import SILENT
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.program import Program, Work
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tools import bench
from lingvo_gshard.tools.benchmarks import exported as exported_bench
from lingvo_gshard.tools.benchmarks.exported import SavedStep, product_dtype
from lingvo_gshard.tools.console import startup
from lingvo_gshard.wings.saved_programs import program_file
from tests.told import Told

ROOT = pathlib.Path(__file__).resolve().parents[3]
ROWS, LENGTH, VOCABULARY, MODEL = 4, 20, 8, 6
REPLICATED = ((), ())
STATE = [
    Array("step", (), "int32", ()),
    Array("theta.norm.scale", (MODEL,), "float32", ((),)),
    Array("theta.table", (VOCABULARY, MODEL), "float32", REPLICATED),
    Array("moments.table.first_moment", (VOCABULARY, MODEL), "float32", REPLICATED),
]
BATCH = [
    Array(f"batch.{name}", (ROWS, LENGTH), "int32", (("data",), ()))
    for name in ("ids", "positions", "segments")
]
WORK = Work(2 * ROWS * LENGTH * MODEL * VOCABULARY, ROWS * LENGTH, (("batch.ids", VOCABULARY),))

# Runs the command without TensorFlow.
ALONE = """
import sys
sys.modules["tensorflow"] = None
sys.argv[0] = "gshard-bench"
from lingvo_gshard.tools.console import launcher
from lingvo_gshard.core.progress import SILENT
from tests.told import Told
launcher.run_script()
"""


def train_step(step, scale, table, moment, ids, positions, segments):
    """Shrinks the table and returns a loss that encodes the batch's values."""
    x_BLM = tf.gather(table, ids) * scale
    logits_BLV = tf.einsum("BLM,VM->BLV", x_BLM, table)
    loss = tf.reduce_mean(tf.square(logits_BLV)) + tf.reduce_sum(moment)
    loss += tf.cast(
        tf.reduce_max(ids) + tf.reduce_max(positions) + tf.reduce_max(segments), tf.float32
    )
    moved = table * 0.9
    values = [step + 1, scale, moved, moment, tf.stack([loss, 1.0, 0.1])]
    arrays = [*STATE, Array("metrics", (3,), "float32", ((),))]
    return [(a.path, value, a.split) for a, value in zip(arrays, values, strict=True)]


def init_state():
    values = [0, tf.ones(MODEL), tf.ones((VOCABULARY, MODEL)), tf.zeros((VOCABULARY, MODEL))]
    return [(a.path, tf.convert_to_tensor(v), a.split) for a, v in zip(STATE, values, strict=True)]


def make(function, mesh: str = "data=1", work: Work | None = WORK) -> Program:
    partitioning = Partitioning.make(mesh, "data")
    inputs = [*STATE, *BATCH] if function is train_step else []
    donated = range(len(STATE)) if inputs else ()
    program = lower(function.__name__, function, inputs, partitioning, donated)
    return dataclasses.replace(program, work=work)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    """Returns the directory of step.zip for one device and of other programs."""
    directory = tmp_path_factory.mktemp("saved")
    step = make(train_step)
    step.save(directory / "step.zip")
    dataclasses.replace(step, work=None).save(directory / "uncounted.zip")
    unknown = dataclasses.replace(WORK, vocabularies=())
    dataclasses.replace(step, work=unknown).save(directory / "unknown_ids.zip")
    make(init_state).save(directory / "init.zip")
    make(init_state, "data=2").save(directory / "init2.zip")
    make(train_step, "data=2").save(directory / "step2.zip")
    make(train_step, "data=64").save(directory / "step64.zip")
    return directory


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Returns (exit code, standard output, standard error)."""
    code = startup.guarded(bench.NAME, bench.main)([bench.NAME, "exported", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_exported_step_runs_without_tensorflow(files):
    flags = ["step.zip", "--repeats=3", "--gemm_size=128", "--json=row.json"]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "exported", *flags],
        cwd=files,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "MFU" in done.stdout and "1 x cpu as data=1" in done.stdout
    result = json.loads((files / "row.json").read_text())
    (row,) = result["rows"]
    assert result["device"] == "cpu" and row["file"] == "step.zip"
    assert row["flops"] == WORK.flops and row["tokens"] == WORK.tokens
    assert row["fastest_seconds"] <= row["step_seconds"] <= row["slowest_seconds"]
    assert row["tokens_per_second"] == pytest.approx(WORK.tokens / row["step_seconds"])
    assert row["mfu"] == pytest.approx(WORK.flops / row["step_seconds"] / row["gemm_rate"])
    assert row["gemm_dtype"] == "float32" and row["gemm_size"] == 128
    assert row["last_loss"] < row["first_loss"]


@pytest.mark.parametrize(("file", "initial"), [("step.zip", "init.zip"), ("step2.zip", None)])
def test_state_and_batch_have_the_documented_values(files, capsys, file, initial):
    """The loss encodes the largest id, position and segment, and is known for weights of 1."""
    flags = [f"--init_state={files / initial}"] if initial else []
    small = ["--repeats=1", "--gemm_size=8", "--json"]
    code, out, err = run(capsys, str(files / file), *flags, *small)
    assert code == 0, err
    (row,) = json.loads(out)["rows"]
    assert row["devices"] == (1 if initial else 2) and row["gemm_size"] == 8
    batch = (VOCABULARY - 1) + 15 + 2
    expected = batch + (MODEL**2 if initial else 0)
    assert row["first_loss"] == pytest.approx(expected, abs=1e-3)


def test_jax_rejects_files_lowered_for_another_platform(files):
    record, exported, _ = program_file.read(files / "step.zip")
    step = jax.export.deserialize(bytearray(exported))
    assert step.platforms == ("cpu",) and "custom_call" not in step.mlir_module()
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in record.inputs]
    for platform in ("cuda", "tpu"):
        jax.jit(step.call).trace(*arguments).lower(lowering_platforms=(platform,))


def test_results_are_medians_of_alternating_runs(files, monkeypatch):
    """The clock measures a step and a matmul first, then alternating runs of steps and matmuls."""
    clock = iter([0.1, 0.05, 0.2, 0.01, 0.3, 0.02, 0.1, 0.03])
    counts = []

    def seconds(start, count):
        counts.append(count)
        return next(clock)

    monkeypatch.setattr(exported_bench, "pipelined_seconds", seconds)
    told = Told()
    row = exported_bench.measure(str(files / "step.zip"), None, 3, 8, told)
    assert (row.step_seconds, row.fastest_seconds, row.slowest_seconds) == (0.2, 0.1, 0.3)
    assert row.gemm_rate == pytest.approx(2 * 8**3 / 0.02)
    assert counts == [1, 1, 5, 10, 5, 10, 5, 10]
    assert told.stages[-1] == "measuring, 3 of 3"


def test_reference_matmul_is_large_enough_for_full_speed(monkeypatch):
    monkeypatch.setattr(exported_bench, "products", lambda devices, dtype, size: size)
    for rate, size in ((1e11, 2048), (5e12, 4096), (1e15, 8192)):
        monkeypatch.setattr(
            exported_bench,
            "pipelined_seconds",
            lambda start, count, rate=rate: 2 * start**3 / rate,
        )
        assert exported_bench._large_enough([], "float32") == size


def test_non_finite_loss_is_an_error(files, monkeypatch):
    steps = iter([1.0, 1.0, 1.0])
    monkeypatch.setattr(SavedStep, "__call__", lambda self: lambda: next(steps, float("nan")))
    with pytest.raises(
        ValueError, match="step.zip: the loss is 1.0 and then nan; pass real weights"
    ):
        exported_bench.measure(str(files / "step.zip"), None, 1, 8, SILENT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exported takes one file, 0 were given; write it with gshard-inspect --program="),
        (["step.zip", "step2.zip"], "exported takes one file, 2 were given"),
        (["none.zip"], "none.zip"),
        (["init.zip"], "init.zip holds the program 'init_state', but 'train_step' was expected"),
        (["uncounted.zip"], "uncounted.zip does not say its useful operations"),
        (
            ["unknown_ids.zip"],
            "unknown_ids.zip: the task gives no range of valid ids for",
        ),
        (["step64.zip"], "is for --mesh=data=64, 64 devices, but there are"),
        (["step.zip", "--init_state=step.zip"], "but 'init_state' was expected"),
        (["step.zip", "--init_state=init2.zip"], "4 arrays on data=2, 4 on data=1 expected"),
        (["step.zip", "--repeats=0"], "repeats"),
    ],
)
def test_user_errors_are_one_line(files, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    code, out, err = run(capsys, *arguments)
    assert code == 1 and out == ""
    assert err.startswith("gshard-bench: error: ") and err.count("\n") == 1
    assert message in err


def test_reference_matmul_uses_the_steps_main_dtype():
    def products(a, b, c):
        return a @ b, (c @ c).astype(np.float32)

    sizes = {"a": (4, 64, "float32"), "b": (64, 4, "float32"), "c": (16, 16, "bfloat16")}
    structs = [jax.ShapeDtypeStruct(shape[:2], shape[2]) for shape in sizes.values()]
    assert product_dtype(jax.jit(products).lower(*structs).as_text()) == "bfloat16"
    plain = (
        "%1 = stablehlo.dot %0, %0 : (tensor<64x64xf16>, tensor<64x64xf16>) -> tensor<64x64xf16>"
    )
    assert product_dtype(plain) == "float16"
    assert product_dtype("nothing") == "float32"
