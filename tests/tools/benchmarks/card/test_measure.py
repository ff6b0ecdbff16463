# tests: tools/benchmarks/card/measure.py, tools/benchmarks/card/command.py
# tests: tools/benchmarks/card/folder.py, tools/profile_reports/profile_report.py
"""Measures a tiny step that fills a CPU, without TensorFlow, and compares it with its plan."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import msgspec
import pytest
import tensorflow as tf
from jaxlib import _hlo

from lingvo_gshard.core.progress import SILENT
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.program import LayerNames, Work
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tools import bench
from lingvo_gshard.tools.benchmarks.card import folder as card_folder
from lingvo_gshard.tools.benchmarks.card import measure
from lingvo_gshard.tools.benchmarks.card.folder import CardRecord
from lingvo_gshard.tools.benchmarks.exported import SavedStep
from lingvo_gshard.tools.console import startup
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.programs.planned import ProgramFacts, plan_file
from lingvo_gshard.wings.profiling import xspace
from lingvo_gshard.wings.profiling.comparison import PartComparison
from lingvo_gshard.wings.profiling.summary import StepFacts, Summary
from lingvo_gshard.wings.profiling.timeline import StepRange
from lingvo_gshard.wings.profiling.trace import INPUT, STEP
from lingvo_gshard.wings.profiling.xspace import XSpace
from lingvo_gshard.wings.saved_programs import platforms, program_file
from tests.profiling import cpu_trace
from tests.profiling.cpu_trace import HLO, NUMBER, PRODUCT_FLOPS, PROGRAM, Plane

ROOT = pathlib.Path(__file__).resolve().parents[4]
ROWS, LENGTH, VOCABULARY, MODEL = 4, 20, 8, 64
STATE = [
    Array("theta.attention.w", (MODEL, MODEL), "float32", ((), ())),
    Array("theta.table", (VOCABULARY, MODEL), "float32", ((), ())),
]
BATCH = [
    Array(f"batch.{name}", (ROWS, LENGTH), "int32", (("data",), ()))
    for name in ("ids", "positions", "segments")
]
WORK = Work(2 * ROWS * LENGTH * MODEL * MODEL, ROWS * LENGTH, (("batch.ids", VOCABULARY),))
LAYERS = LayerNames(("attention", "loss", "softmax"), (("attention", "attention"),))

# Runs the command where nothing is installed but jax, msgspec, protobuf, absl and rich.
ALONE = """
import sys
for name in ("tensorflow", "gin", "orbax", "sacrebleu", "sentencepiece", "tokenizers",
             "tensorstore", "tensorboard", "safetensors", "polib", "starlette", "grain"):
    sys.modules[name] = None
sys.argv[0] = "gshard-bench"
from lingvo_gshard.tools.console import launcher
launcher.run_script()
"""


def train_step(w, table, ids, positions, segments):
    """A product in an attention layer and one in a softmax, and an optimizer's update."""
    x_BLM = tf.gather(table, ids)
    with tf.name_scope("attention"):
        x_BLM = tf.einsum("BLM,MN->BLN", x_BLM, w)
    with tf.name_scope("softmax"):
        logits_BLV = tf.einsum("BLM,VM->BLV", x_BLM, table)
    loss = tf.reduce_mean(tf.square(logits_BLV))
    loss += tf.cast(tf.reduce_max(positions + segments), tf.float32)
    with tf.name_scope("optimizer"):
        w *= 0.9
    return [
        (STATE[0].path, w, STATE[0].split),
        (STATE[1].path, table, STATE[1].split),
        ("metrics", tf.stack([loss, 1.0, 0.1]), ((),)),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """Returns a folder as `gshard-bench fill` writes it."""
    path = tmp_path_factory.mktemp("card")
    partitioning = Partitioning.make("data=1", "data")
    program = lower("train_step", train_step, [*STATE, *BATCH], partitioning, (0, 1))
    dataclasses.replace(program, work=WORK, layers=LAYERS).save(path / card_folder.STEP)
    plan = plan_file(path / card_folder.STEP, topologies.get("cpu:1"), ProgramFacts())
    (path / card_folder.PLAN).write_text(plan.to_json())
    write_card(path, "cpu:1")
    return path


def write_card(path: pathlib.Path, topology: str) -> None:
    record = CardRecord(
        experiment="train_step",
        settings=[],
        grown="task.decoder.num_layers",
        value=3,
        topology=topology,
        memory=2**20,
        share=0.9,
    )
    (path / card_folder.CARD).write_bytes(msgspec.json.encode(record))


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Returns (exit code, standard output, standard error)."""
    code = startup.guarded(bench.NAME, bench.main)([bench.NAME, "card", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_card_is_measured_without_tensorflow(folder):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            ALONE,
            "card",
            ".",
            "--repeats=1",
            "--gemm_size=64",
            "--json=c.json",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "not counted by jax here" in done.stdout and "goal 50%" in done.stdout
    (row,) = json.loads((folder / "c.json").read_text())["rows"]
    plan = json.loads((folder / card_folder.PLAN).read_text())
    measured = row["measured"]
    assert row["planned_seconds"] == plan["seconds_per_step"]
    assert row["seconds_by_plan"] == pytest.approx(
        measured["step_seconds"] / plan["seconds_per_step"]
    )
    assert row["planned_peak"] == plan["bytes_per_device"]["peak"]
    assert measured["memory_in_use"] is None and row["memory_by_plan"] is None
    kinds = {each["part"]: each for each in row["comparison"]["kinds"]}
    assert kinds["attention"]["measured"] > 0 and kinds["attention"]["predicted"] > 0
    assert kinds["products"]["measured"] > 0
    layers = {each["part"] for each in row["comparison"]["layers"]}
    assert {"attention", "softmax"} <= layers
    seconds = [gap["seconds"] for gap in row["kind_gaps"]]
    assert seconds == sorted(seconds, reverse=True)
    assert "goal 50%" in row["findings"][0]
    assert row["profile"]["attainable"]["flops_per_second"] == measured["gemm_rate"]
    assert (folder / "measured.xplane.pb").stat().st_size > 1000


def test_a_trace_of_a_gpu_without_its_program_is_summed_up_with_ours():
    """Kernels on the streams of a GPU name their operations; the trace has no compiled program."""
    space = XSpace()
    host = Plane(space, "/host:CPU")
    for step in range(3):
        host.event("python", STEP, 100 * step, 100 * (step + 1), step_num=step + 1)
        host.event("python", INPUT, 100 * step, 100 * step + 1, step_num=step + 1)
    gpu = Plane(space, "/device:GPU:0")
    of = {"hlo_module": PROGRAM, "program_id": NUMBER}
    for start in (0, 100, 200):
        gpu.event("Stream #13(Compute)", "gemm", start + 10, start + 40, hlo_op="dot.1", **of)
        gpu.event("Stream #13(Compute)", "gemm", start + 40, start + 50, hlo_op="dot.2", **of)
        gpu.event("Stream #13(Compute)", "loop", start + 60, start + 80, hlo_op="sub.1", **of)
    trace = xspace.read(space.SerializeToString())
    assert not trace.programs
    measure.add_program(trace, _hlo.hlo_module_from_text(HLO).as_serialized_hlo_module_proto())
    facts = StepFacts(
        name="step",
        steps=StepRange(1, 3),
        device_summary="1 x NVIDIA H100",
        chip="h100",
        mesh=Mesh.parse("data=1"),
        layers=cpu_trace.LAYERS,
        kinds={"attention": "attention"},
        busy_cores=1.0,
        cores=1,
        useful_flops=PRODUCT_FLOPS,
        tokens_per_step=64,
        attainable=None,
        source_of=lambda _: "",
    )
    profile = Summary(trace, facts).profile()
    seconds = {part.part: round(part.seconds * 1e6, 6) for part in profile.parts}
    assert seconds["products"] == 30 and seconds["attention"] == 10
    assert seconds["optimizer"] == 20 and sum(seconds.values()) == pytest.approx(100)


def test_gaps_are_what_the_plan_does_not_explain():
    part = PartComparison
    compared = measure.Comparison(
        predicted=2.0,
        measured=4.0,
        kinds=[
            part(part="products", phase="", predicted=1.0, measured=1.5),
            part(part="routing and dispatch", phase="", predicted=0.5, measured=1.5),
            part(part="optimizer", phase="", predicted=0.5, measured=0.4),
        ],
        layers=[part(part="", phase="forward", predicted=0.0, measured=1.0)],
    )

    class Paused:
        def seconds_of(self, part):
            return {"host": 0.0, "between operations": 0.6}[part]

    found = measure.kind_gaps(compared, Paused())
    assert [(gap.part, round(gap.seconds, 9), round(gap.share, 9)) for gap in found] == [
        ("routing and dispatch", 1.0, 0.25),
        ("between operations", 0.6, 0.15),
        ("products", 0.5, 0.125),
        ("optimizer", -0.1, -0.025),
    ]
    assert measure.goal_gap(compared) == 0.4
    said = measure.in_words(found, mfu=0.3, wanted=0.4)
    assert "misses the goal: MFU 30.0%" in said[0] and len(said) == 4
    assert said[1].startswith("routing and dispatch: 25.0% of the step")
    assert "reaches" in measure.in_words([], 0.5, 0.5)[0]
    assert measure.of_layers(compared)[0].part == "(no layer), forward"


def test_another_card_is_refused(folder, capsys, tmp_path):
    for name in (card_folder.STEP, card_folder.PLAN):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    write_card(tmp_path, "gpu:h100:1x1")
    code, _, err = run(capsys, str(tmp_path))
    assert code == 1 and err.count("\n") == 1
    assert "was filled for NVIDIA H100" in err and "fill it again with --topology=cpu:1" in err


def test_a_program_of_another_platform_is_refused(folder, tmp_path):
    record, exported, _ = program_file.read(folder / card_folder.STEP)
    assert record.platforms == platforms.ALL
    other = msgspec.structs.replace(record, platforms=("tpu",))
    program_file.write(tmp_path / "tpu.zip", other, exported)
    with pytest.raises(ValueError, match="tpu.zip was exported for tpu, but jax found cpu"):
        SavedStep(str(tmp_path / "tpu.zip"), SILENT)


def test_calls_of_libraries_bind_a_program_to_a_platform():
    call = "%1 = stablehlo.custom_call @{}(%0) : (tensor<8xf32>) -> tensor<8xf32>"
    assert platforms.platforms_of(call.format("Sharding")) == platforms.ALL
    assert platforms.platforms_of(call.format("lapack_spotrf_ffi")) == ("cpu",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "card takes one folder, 0 were given"),
        (["nowhere"], "nowhere has no train_step.zip; gshard-bench fill --folder=nowhere writes"),
    ],
)
def test_user_errors_are_one_line(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert message in err


def test_damaged_record_is_refused(folder, tmp_path):
    for name in (card_folder.STEP, card_folder.PLAN):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / card_folder.CARD).write_text("{}")
    with pytest.raises(ValueError, match="card.json was not written by gshard-bench fill"):
        card_folder.read(str(tmp_path))
