# tests: tools/inspect.py, tools/inspection/compiler.py, tools/inspection/inspection.py
# tests: tools/inspection/tables.py, training/experiments.py
"""Tests gshard-inspect through its command line."""

import json
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from lingvo_gshard.core.config import registry
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.tools import inspect
from lingvo_gshard.tools.console import startup
from lingvo_gshard.tools.inspection import inspection
from lingvo_gshard.tools.inspection.inspection import NO_SINGLE_LAYER, CollectiveTotal
from lingvo_gshard.training import experiments
from lingvo_gshard.wings.compiler_options.table import OPTIONS
from lingvo_gshard.wings.gin.binding import apply_gin
from lingvo_gshard.wings.hlo import CollectiveCall
from tests.tools.tiny_quickstart import EXPERIMENT, SETTINGS
from tests.tools.tiny_quickstart import FLAGS as TINY

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "programs.md"
EXPERTS = ("--mesh=data=8", "--strategy=expert")


def run_here(capsys, *flags):
    """Returns (exit code, standard output, standard error) of a run in this process."""
    name = inspect.NAME
    code = startup.guarded(name, inspect.main)([name, *TINY, *map(str, flags)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def tiny_params():
    return apply_gin(registry.get(EXPERIMENT), [], SETTINGS)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Returns what is compiled of the training step, with the expert strategy."""
    path = tmp_path_factory.mktemp("compiled") / "step.json"
    flags = [*EXPERTS, "--compile", "--activations=decoder", f"--json={path}"]
    assert inspect.main([inspect.NAME, *TINY, *flags]) == 0
    return json.loads(path.read_text())["compiled"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the directory with train_step.zip and init_state.zip, expert strategy."""
    directory = tmp_path_factory.mktemp("saved")
    for function in ("train_step", "init_state"):
        flags = [f"--function={function}", f"--program={directory}/{function}.zip"]
        assert inspect.main([inspect.NAME, *TINY, *EXPERTS, *flags]) == 0
    return directory


# An optimizer with two moments for each weight.
ADAM = "--gin_param=step.optimizer = @lingvo_gshard.training.step.adam.Adam"


def test_every_weight_is_listed_with_its_bytes(capsys, tmp_path):
    path = tmp_path / "split.json"
    flags = ["--mesh=data=4,model=2", "--strategy=expert_tensor", f"--json={path}", ADAM]
    code, out, err = run_here(capsys, *flags)
    assert code == 0 and err == ""
    record = json.loads(path.read_text())
    parts = {"E": 4, "H": 2, "N": 2, "V": 2}
    specs = experiments.make_trainer(tiny_params()).theta_specs.flatten()
    assert [row["path"] for row in record["weights"]] == [spec.path for spec in specs]
    held = 0
    for spec, row in zip(specs, record["weights"], strict=True):
        size = 4 * math.prod(spec.shape)
        cut = math.prod(parts.get(x, 1) for x in spec.layout if x not in spec.unsplit)
        assert (row["bytes"], row["bytes_per_device"]) == (size, size // cut), spec.path
        held += size // cut
        assert spec.path in out
    assert record["weights_bytes_per_device"] == held
    assert record["moments_bytes_per_device"] == 2 * held and "moments" not in record
    assert "E over data (4), H over model (2)" in out
    assert "weights: 34 arrays, 53.6 KiB; each device holds" in out
    (replicated,) = record["replicated"]
    assert replicated["path"] == "encoder.layers[0].feed_forward.router.w_gate"
    assert replicated["reason"] == "the layer does not split E"
    assert replicated["reason"] in out
    assert record["unused_axes"] == [] and "Warning" not in out


def test_moments_are_listed_and_json_is_the_only_standard_output(capsys):
    flags = ["--mesh=data=8", "--strategy=zero1", "--slots", "--json", ADAM]
    code, out, err = run_here(capsys, *flags)
    record = json.loads(out)
    assert code == 0 and "M over data (8)" in err
    assert len(record["moments"]) == 2 * len(record["weights"])
    assert {row["split"] for row in record["weights"]} == {"replicated"}
    held = sum(row["bytes_per_device"] for row in record["moments"])
    assert record["moments_bytes_per_device"] == held < record["moments_bytes"]


def test_replicated_weights_and_unused_axes_are_reported(capsys):
    code, out, _ = run_here(capsys, "--mesh=data=2,model=3", "--strategy=tensor")
    assert code == 0
    assert "Warning: nothing is split over axis 'data': its 2 devices do the same" in out
    assert "replicated (N of 4 does not divide by 3: not split)" in out
    assert "V over model (3) (V of 64 is padded to 66)" in out
    code, out, err = run_here(
        capsys, "--mesh=model=3", "--strategy=tensor", "--max_replicated_mb=0.01"
    )
    assert code == 1 and "--max_replicated_mb=0.01: every device would hold" in err


def test_override_and_custom_strategy_table(capsys):
    flags = [
        "--mesh=data=4,model=2",
        "--strategy=E->data; H->model",
        "--gin_param=sharding.overrides = {'task.encoder': 'H->none', '*.w_key': 'N->data'}",
    ]
    code, out, _ = run_here(capsys, *flags)
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "E over data (4)  " in lines["encoder.layers[0].feed_forward.experts.w_in"]
    assert "H over model (2)" in lines["decoder.layers[0].feed_forward.w_in"]
    assert "N over data (4)" in lines["decoder.layers[0].cross_attention.w_key"]


def test_compiler_options_are_listed_with_reasons_and_sources(capsys):
    flags = ["--mesh=data=2", "--strategy=data", "--compiler=v5p", "--json"]
    name = "xla_enable_async_all_gather"
    code, out, err = run_here(capsys, *flags, "--compile_options=xla_a=true")
    assert code == 0
    found = json.loads(out)["compiler_options"]
    assert (found["platform"], found["device_kind"]) == ("tpu", "v5")
    options = {row["name"]: row for row in found["options"]}
    expected = {row.name for row in OPTIONS if row.platform == "tpu"} | {"xla_a"}
    assert options.keys() == expected
    assert options["xla_a"]["value"] == options[name]["value"] == "True"
    assert options["xla_tpu_enable_async_all_to_all"]["value"] is None
    assert options[name]["reason"] and options[name]["source"].startswith("https://")
    assert "compiler options of steps on tpu, v5:" in err and f"  {name}=True" in err
    code, out, _ = run_here(capsys, *flags[:2], "--compiler=here")
    assert code == 0 and out.endswith("compiler options of steps on cpu, cpu:\n  none\n")


def test_compiler_flags_that_do_not_fit_are_refused(capsys):
    code, _, err = run_here(capsys, "--mesh=data=2", "--compiler=v5q")
    assert code == 1 and "--compiler=v5q is unknown. Did you mean" in err
    code, _, err = run_here(capsys, "--mesh=data=2", "--compile_options=none")
    assert code == 1 and "--compile_options=none applies to --compiler, which is not given" in err


def test_kernels_are_listed_with_the_reasons_why_layers_have_none(capsys):
    flags = ["--mesh=data=2", "--strategy=data", "--kernels=tpu", "--json"]
    code, out, err = run_here(capsys, *flags)
    assert code == 0
    found = json.loads(out)["kernels"]
    paths = ("decoder.layers[0].cross_attention", "decoder.layers[0].self_attention")
    short = "rows of fewer than 128 positions are faster without Splash attention"
    assert found["platform"] == "tpu"
    assert found["layers"] == [
        {"path": path, "kernel": "attention", "obstacle": short, "advice": ""}
        for path in (*paths, "encoder.layers[0].self_attention")
    ]
    said = f"no kernel computes the attention of {paths[0]} and 2 more: {short}"
    assert f"kernels of train_step on tpu:\n  {said}" in err


def test_long_rows_use_the_platforms_kernel(capsys):
    lengths = [f"--gin_param=input.{side}_length = 128" for side in ("source", "target")]
    flags = ["--mesh=data=1", "--kernels=cuda", "--function=eval_step", *lengths]
    code, out, _ = run_here(capsys, *flags)
    expected = "the platform's kernel computes the attention of decoder.layers[0].cross_attention"
    assert code == 0 and f"kernels of eval_step on cuda:\n  {expected} and 2 more" in out


@pytest.mark.slow
def test_a_platform_without_kernels_says_so(capsys):
    flags = ["--mesh=data=1", "--function=init_state"]
    code, out, _ = run_here(capsys, *flags, "--kernels=here")
    assert code == 0
    assert out.endswith("cpu:\n  cpu has no kernels; those of cuda and tpu are known\n")
    code, out, _ = run_here(capsys, *flags, "--kernels=tpu")
    assert code == 0 and out.endswith("tpu:\n  no layer could use a kernel\n")
    code, _, err = run_here(capsys, *flags, "--kernels=tpus")
    assert code == 1 and "--kernels=tpus is unknown. Did you mean 'tpu'?" in err
    code, _, err = run_here(capsys, *flags, "--kernels=tpu", "--partitioner=shardy")
    assert code == 1 and "--kernels=tpu: programs of --partitioner=shardy use no kernels" in err


def test_collectives_are_listed_by_layer_with_memory(compiled):
    rows = compiled["collectives"]
    counts = {(row["layer"], row["phase"], row["kind"]): row["count_per_step"] for row in rows}
    moe = "encoder.layers[0].feed_forward"
    for phase in ("forward", "backward"):
        assert counts.pop((moe, phase, "all-to-all")) == 2
    assert {kind for _, _, kind in counts} == {"all-reduce"}
    for row in rows:
        assert row["bytes_per_step"] > 0 and row["count_in_program"] == row["count_per_step"]
        if row["kind"] == "all-to-all":
            # Two tensors of [E,G,C,M] float32 on each of 8 devices: E=8, G=16, C=4, M=16.
            assert row["bytes_per_step"] == 2 * 4 * 8 * 16 * 4 * 16 // 8
    memory = compiled["memory_per_device"]
    assert memory["peak"] > memory["arguments"] > 0 < memory["temporaries"]
    assert compiled["full_replications"] == [] and compiled["function"] == "train_step"


def test_activations_are_listed_with_layer_line_and_bytes(compiled):
    rows = {(row["layer"], row["layout"]): row for row in compiled["activations"]}
    assert all(layer.startswith("decoder") for layer, _ in rows)
    hidden = rows["decoder.layers[0].feed_forward", "BLH"]
    assert hidden["asked"] == hidden["chosen"] == "B over data"
    assert hidden["shape"] == [16, 16, 32] and hidden["parts"] == 8
    assert hidden["bytes"] == 8 * hidden["bytes_per_device"] == 4 * 16 * 16 * 32
    assert re.fullmatch(r"lingvo_gshard/layers/\w+\.py:\d+", hidden["source"])
    by_xla = [row for row in compiled["activations"] if not row["asked"]]
    assert by_xla and {row["layout"] for row in by_xla} == {""}


def test_data_that_moves_is_attributed_to_annotations(compiled):
    rows = compiled["reshardings"]
    assert {row["kind"] for row in rows} == {"all-to-all"} and len(rows) == 4
    dispatch, combine = [row for row in rows if row["phase"] == "forward"]
    assert {dispatch["layer"], combine["layer"]} == {"encoder.layers[0].feed_forward"}
    assert (dispatch["layout"], combine["layout"]) == ("EGCM", "GECM")
    assert (dispatch["before"], dispatch["after"]) == ("G over data", "E over data")
    assert "moe/exchange.py:" in dispatch["annotated_at"]


@pytest.mark.slow
def test_saved_programs_equal_the_runtimes(saved):
    step = Program.load(saved / "train_step.zip")
    init = Program.load(saved / "init_state.zip")
    assert (step.name, init.name) == ("train_step", "init_state")
    assert str(step.mesh) == "data=8" and len(step.donated) == len(init.outputs)
    assert [a.path for a in step.inputs[: len(init.outputs)]] == [a.path for a in init.outputs]


@pytest.mark.slow
def test_saved_programs_run_under_jax_alone_as_documented(saved):
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (alone,) = [text for text in snippets if "zipfile" in text]
    alone += "\nimport sys; assert not {'tensorflow', 'lingvo_gshard'} & set(sys.modules)\n"
    command = [sys.executable, "-c", alone]
    run = subprocess.run(command, cwd=saved, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    losses = [float(line.removeprefix("loss")) for line in run.stdout.splitlines()]
    params = tiny_params()
    specs = experiments.batch_specs(params)
    batch = {name: np.ones(spec.shape, np.int32) for name, spec in specs.items()}
    local = SingleDeviceRuntime(experiments.make_trainer(params))
    local.init_state()
    expected = [local.train_step(batch).read()["loss"] for _ in losses]
    assert len(losses) == 3
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def call(layer: str, phase: str, kind: str, size: int, times: int = 1) -> CollectiveCall:
    return CollectiveCall(kind, ("data",), 8, "float32", size, "name", layer, phase, times)


def test_collectives_are_summed_by_phase_layer_and_kind():
    calls = [
        call("", "other", "all-reduce", 1),
        call("a", "backward", "all-gather", 2),
        call("b/layers_10", "forward", "all-gather", 3, times=4),
        call("a", "rematerialized", "all-to-all", 5),
        call("b/layers_10", "forward", "all-gather", 7),
        call("a", "forward", "all-to-all", 8),
    ]
    rows = inspection.collective_rows(calls, ["", "a", "b.layers[10]"])
    assert rows == [
        CollectiveTotal("a", "forward", "all-to-all", 1, 1, 8),
        CollectiveTotal("b.layers[10]", "forward", "all-gather", 2, 5, 19),
        CollectiveTotal("a", "rematerialized", "all-to-all", 1, 1, 5),
        CollectiveTotal("a", "backward", "all-gather", 1, 1, 2),
        CollectiveTotal(NO_SINGLE_LAYER, "other", "all-reduce", 1, 1, 1),
    ]
    assert inspection.total_by_kind(rows) == [
        CollectiveTotal("", "", "all-gather", 3, 6, 21),
        CollectiveTotal("", "", "all-reduce", 1, 1, 1),
        CollectiveTotal("", "", "all-to-all", 2, 2, 13),
    ]


@pytest.mark.slow
def test_collectives_of_recomputed_layers_are_not_reported_as_forward(capsys):
    """Full rematerialization runs the loop's layers again in the backward pass."""
    options = {
        "num_layers": 2,
        "moe_every": 1,
        "execution": "@lingvo_gshard.wings.repeat.loop.Repeat",
        "execution.rematerialize": "'full'",
    }
    flags = [f"--gin_param=task.encoder.{name} = {value}" for name, value in options.items()]
    code, out, _ = run_here(
        capsys, *flags, "--mesh=data=8", "--strategy=expert", "--compile", "--json"
    )
    assert code == 0
    rows = json.loads(out)["compiled"]["collectives"]
    counts = {
        row["phase"]: (row["count_in_program"], row["count_per_step"])
        for row in rows
        if row["kind"] == "all-to-all"
    }
    assert counts == {"forward": (2, 4), "rematerialized": (2, 4), "backward": (2, 4)}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--mesh is missing, such as --mesh=data=4,model=2"),
        (["--mesh=data=8", "--experiment=translation.quikstart"], f"Did you mean '{EXPERIMENT}'?"),
        (["--mesh=data"], "--mesh=data: 'data'; expected axes with their sizes"),
        (["--mesh=data=8", "--strategy=expret"], "Did you mean 'expert'?"),
        (["--mesh=data=8", "--strategy=Q->data"], "'Q' is not the letter of a dimension"),
        (["--mesh=data=8", "--partitioner=shardi"], "Did you mean 'shardy'?"),
        (["--mesh=data=8", "--function=train"], "Did you mean 'train_step'?"),
        (["--mesh=data=8", "--gin_param=task.modle_dim = 3"], "Did you mean 'task.model_dim'?"),
        (["--mesh=data=8", "--runtime=spmd"], "'runtime'"),
        (["--mesh=data=8", "--activations=decodr"], "Did you mean 'decoder'?"),
        (["--mesh=data=1", "--activations=*"], "expected a mesh of several devices"),
        (
            ["--mesh=data=8", "--gin_param=sharding.overrides = {'task.encodre': 'H->none'}"],
            "no layer or weight is named 'task.encodre'. Did you mean 'encoder'?",
        ),
    ],
)
def test_user_errors_are_one_line(flags, words, capsys):
    code, out, err = run_here(capsys, *flags)
    assert code == 1 and out == ""
    assert err.startswith("gshard-inspect: error: ") and err.count("\n") == 1
    assert words in err


def test_unwritable_files_are_reported_before_anything_is_done(capsys):
    for flag in ("--json=/dev/null/x", "--program=/dev/null/x"):
        code, out, err = run_here(capsys, "--mesh=data=2", flag)
        assert code == 1 and out == "" and err.count("\n") == 1
        assert err.startswith(f"gshard-inspect: error: {flag} cannot be written: ")


def test_help_has_examples_and_all_flags(capsys):
    with pytest.raises(SystemExit) as exit_:
        inspect.main([inspect.NAME, "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    words = " ".join(out.replace("\\\n", "").split())
    assert "--mesh=data=8 --strategy=expert --compile" in words
    for name in inspect.define_flags():
        assert f"--{name}" in out


def test_pipelines_are_listed_with_their_bubbles(capsys):
    options = {
        "num_layers": 4,
        "moe_every": 1,
        "execution": "@lingvo_gshard.wings.pipeline.pipeline.Pipeline",
        "execution.stages": 4,
        "execution.micro_batches": 8,
    }
    flags = [f"--gin_param=task.encoder.{name} = {value}" for name, value in options.items()]
    code, out, _ = run_here(capsys, *flags, "--mesh=stage=4", "--strategy=pipeline")
    assert code == 0
    assert "encoder.layers: a pipeline of 4 stages, 8 micro-batches and 1 circulations" in out
    assert "takes 11 ticks. Its stages are idle 27.3% of the time." in out
