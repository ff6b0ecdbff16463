# tests: tools/bench.py, tools/benchmarks/step.py
# tests: tools/benchmarks/common.py, tools/benchmarks/timing.py
"""Runs gshard-bench at tiny sizes: measurements, output and errors."""

import json

import msgspec
import numpy as np
import pytest

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.config.registry import Experiment
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.data.translation_input import TranslationInput
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.tools import bench
from lingvo_gshard.tools.benchmarks import step
from lingvo_gshard.tools.console import startup
from lingvo_gshard.training.run.options import RunOptions
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.step import FORWARD_AND_BACKWARD
from lingvo_gshard.wings.profiling.profile import Profile
from tests import tiny
from tests.told import Told

EXPERIMENT = "test.tiny_translation"
TINY = (
    "--repeats=2",
    "--gemm_size=16",
    "--model_dim=8",
    "--hidden_dim=12",
    "--tokens=16",
    f"--experiment={EXPERIMENT}",
    "--num_experts=4",
    "--num_heads=2",
    "--row_length=8",
)
NAMES = [
    f"{EXPERIMENT}, experts",
    f"{EXPERIMENT}, dense",
    "layers, experts",
    "layers, dense",
]


def _stack(**values) -> Params:
    stack = TransformerStack.params().set(num_layers=1, num_heads=2, hidden_dim=12, **values)
    stack.moe_every = 1
    stack.moe.num_experts = 4
    return stack


def tiny_translation() -> Params:
    """Returns a translation experiment with a very fast step."""
    task = TranslationTask.params().set(
        model_dim=8, share_embeddings=True, encoder=_stack(), decoder=_stack(is_decoder=True)
    )
    input_ = TranslationInput.params().set(batch_rows=2, source_length=6, target_length=20)
    input_.vocabulary.size = 30
    return Experiment.params().set(
        task=task, input=input_, step=Trainer.params(), run=RunOptions.params()
    )


@pytest.fixture(autouse=True)
def experiment(monkeypatch):
    monkeypatch.setitem(registry._EXPERIMENTS._features, EXPERIMENT, tiny_translation)


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Returns (exit code, standard output, standard error)."""
    code = startup.guarded(bench.NAME, bench.main)([bench.NAME, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
def test_step_writes_a_row_for_each_model(capsys, tmp_path):
    path = tmp_path / "step.json"
    code, out, _ = run(capsys, "step", f"--json={path}", *TINY)
    assert code == 0 and "ratio" in out
    result = json.loads(path.read_text())
    assert result["device"] in ("CPU", "GPU")
    assert [row["name"] for row in result["rows"]] == NAMES
    keys = {"name", "flops", "seconds", "gemm_rate", "ratio", "compile_seconds"}
    for row in result["rows"]:
        assert set(row) == keys
        assert row["ratio"] == pytest.approx(row["flops"] / row["seconds"] / row["gemm_rate"])
        assert 0 < row["seconds"] < row["compile_seconds"]


@pytest.mark.slow
def test_step_writes_a_profile_of_each_model(capsys, tmp_path):
    code, out, _ = run(capsys, "step", f"--profile={tmp_path}", *TINY)
    assert code == 0 and "Largest part" in out
    paths = list(tmp_path.glob("*/profile/plugins/profile/steps_1-3/profile.json"))
    found = [msgspec.json.decode(path.read_bytes(), type=Profile) for path in paths]
    profiles = {profile.name: profile for profile in found}
    assert set(profiles) == set(NAMES)
    for profile in profiles.values():
        assert sum(part.share for part in profile.parts) == pytest.approx(1)
        total = sum(part.seconds for part in profile.parts)
        assert total == pytest.approx(profile.seconds_per_step)


def test_json_is_the_only_standard_output(capsys, monkeypatch):
    def measure(cases, *_):
        return [step.StepTiming(case.name, case.flops, 2.0, 4e9, 0.5, 1.0) for case in cases]

    monkeypatch.setattr(step, "measure", measure)
    code, out, err = run(capsys, "step", *TINY, "--json")
    assert code == 0 and "ratio" in err
    assert [row["name"] for row in json.loads(out)["rows"]] == NAMES


def test_step_cases_have_a_sparse_and_a_dense_model():
    with_experts, dense = step.experiment_cases(registry.get(EXPERIMENT))
    for case in (with_experts, dense):
        task = case.trainer.task
        assert task.p.source_vocabulary_size == task.p.target_vocabulary_size == 30
        assert case.flops == FORWARD_AND_BACKWARD * flops(task, TokenShape(2, 20, memory_length=6))
        shapes = {name: value.shape for name, value in case.batch.items()}
        sources = {name: shape for name, shape in shapes.items() if name.startswith("source")}
        assert len(sources) == 3 and set(sources.values()) == {(2, 6)}
        assert len(shapes) == 7 and set(shapes.values()) == {(2, 6), (2, 20)}
        assert all(value.dtype == np.int32 for value in case.batch.values())
        assert case.batch["target_segments"].min() == 1
        assert case.batch["target_positions"][0].tolist() == [*range(16), *range(4)]
    letters = [
        "".join(spec.layout for spec in case.trainer.theta_specs.flatten())
        for case in (with_experts, dense)
    ]
    assert "E" in letters[0] and "E" not in letters[1]
    router = 2 * 3 * 2 * (6 + 20) * 8 * 4
    assert with_experts.flops - router == dense.flops


def test_dense_experiment_has_one_step_case():
    experiment = tiny_translation().set(name="test.dense")
    for stack in (experiment.task.encoder, experiment.task.decoder):
        stack.moe_every = 0
    cases = step.experiment_cases(experiment)
    assert [case.name for case in cases] == ["test.dense, dense"]


def test_ratio_compares_the_fastest_step_with_the_fastest_matmul(monkeypatch):
    """The clock measures the first step, then alternating steps and matmuls."""
    clock = iter([5.0, 2.0, 0.5, 1.0, 0.125])
    monkeypatch.setattr(step, "seconds_of", lambda function: next(clock))
    # The real products: how many there are is a part of the rate.
    case = step.experiment_cases(registry.get(EXPERIMENT))[1]
    told = Told()
    (row,) = step.measure([case], 2, 8, told)
    product = 2 * 8**3
    rate = round(case.flops / product) * product / 0.125
    assert (row.compile_seconds, row.seconds, row.gemm_rate) == (5.0, 1.0, rate)
    assert row.ratio == case.flops / 1.0 / rate
    assert told.stages == [f"compiling {case.name}", "measuring, 1 of 2", "measuring, 2 of 2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "the subcommand is missing. Valid: card, exported, fill, input, step",
        ),
        (["decode"], "step. The repository has python -m benchmarks decode"),
        (["moe"], "The repository has python -m benchmarks moe"),
        (["stp"], "'stp' is unknown. Did you mean 'step'?"),
        (["step", "--experiment=test.tiny_translatoin"], f"Did you mean '{EXPERIMENT}'?"),
        (["step", "--repeat=3"], "repeats"),
        (["step", "--repeats=0"], "repeats"),
        (["step", "again"], "'again'"),
        (
            ["step", "--tokens=10", "--row_length=4"],
            "--tokens=10 is not a multiple of --row_length=4",
        ),
    ],
)
def test_user_errors_are_one_line(capsys, arguments, message):
    given = TINY if arguments[:1] == ["step"] else ()
    code, out, err = run(capsys, *arguments[:1], *given, *arguments[1:])
    assert code == 1 and out == ""
    assert err.startswith("gshard-bench: error: ") and err.count("\n") == 1
    assert message in err


def test_step_cases_of_a_language_model():
    experiment = registry.get("language_model.quickstart")
    experiment.input.set(batch_rows=2, length=20, cleaning=None)
    experiment.task.set(model_dim=8)
    with_experts, dense = step.experiment_cases(experiment)
    assert [c.name for c in (with_experts, dense)] == [
        "language_model.quickstart, experts",
        "language_model.quickstart, dense",
    ]
    task = with_experts.trainer.task
    assert with_experts.flops == FORWARD_AND_BACKWARD * flops(task, TokenShape(2, 20))
    assert {value.shape for value in with_experts.batch.values()} == {(2, 20)}
    ids = with_experts.batch["target_inputs"]
    assert ids.min() >= 4 and ids.max() < task.p.vocabulary_size


def test_step_case_of_a_custom_task():
    (case,) = step.experiment_cases(tiny.experiment_params())
    assert case.name == "test.tiny, dense"
    assert case.batch["x"].dtype == np.float32 and case.batch["x"].shape == (16, tiny.INPUTS)
    assert case.batch["y"].max() < tiny.CLASSES
    assert case.flops == 3 * 2 * 16 * (tiny.INPUTS + tiny.CLASSES) * tiny.HIDDEN


def test_help_has_examples_and_all_flags(capsys):
    with pytest.raises(SystemExit) as exit_:
        bench.main([bench.NAME, "step", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "gshard-bench step --json=step.json" in out and "--repeats" in out
