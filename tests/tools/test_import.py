# tests: tools/import.py, tools/export.py, api/importing.py
"""Tests gshard-import through its command line, and the commands that go on from an import."""

import importlib
import json

import pytest

from lingvo_gshard.tools import evaluate, export, generate, plan, train
from lingvo_gshard.tools.console import startup
from tests.open_models import published

# The name of the command is a word of Python.
importing = importlib.import_module("lingvo_gshard.tools.import")


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """Returns a function from a command to (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    published.write(tmp_path / "model")

    def run(command, main):
        name, *flags = command
        code = startup.guarded(name, main)([name, *flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_model_is_imported(run_here, tmp_path):
    command = ["gshard-import", "--from=model", "--logdir=run", "--json=found.json"]
    code, out, err = run_here(command, importing.main)
    assert (code, err) == (0, "")
    assert "Imported 1,768 weights of open_models.llama from 21 tensors" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tensors"] == 21 and found["parameters"] * 4 == found["bytes"]
    code, _, err = run_here(command, importing.main)
    assert code == 1 and "--logdir=run exists already" in err


def test_hyperparameters_are_shown_and_set(run_here):
    flags = ["gshard-import", "--from=model", "--gin_param=step.clip_norm = 0.25"]
    code, out, _ = run_here([*flags, "--params=clip_norm"], importing.main)
    assert code == 0 and "step.clip_norm = 0.25" in out
    code, _, err = run_here([*flags, "--logdir=run", "--precision=float8"], importing.main)
    assert code == 1 and "float8" in err
    assert run_here(["gshard-import"], importing.main)[2].endswith(
        "--from is missing: the directory of the published model\n"
    )


def test_keys_that_do_not_matter_are_named(run_here, tmp_path):
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_causal": False, "extra": [1]}))
    command = ["gshard-import", "--from=model", "--logdir=run"]
    code, _, err = run_here([*command, "--ignore_keys=extra"], importing.main)
    assert code == 1 and "is_causal is False, which is not supported; True was expected" in err
    code, out, err = run_here([*command, "--ignore_keys=extra,is_causal"], importing.main)
    assert (code, err) == (0, "") and "Imported 1,768 weights" in out
    values = plan.define_flags()
    values(["gshard-plan", "--config=model", "--length=16", "--ignore_keys=extra,is_causal"])
    assert plan.planned_params(values).input.length == 16
    values = plan.define_flags()
    values(["gshard-plan", "--experiment=x", "--ignore_keys=extra"])
    with pytest.raises(ValueError, match="--ignore_keys=extra applies to --config"):
        plan.planned_params(values)


def test_a_config_is_an_experiment_to_plan(run_here):
    values = plan.define_flags()
    values(["gshard-plan", "--config=model", "--length=16", "--gin_param=input.batch_rows = 3"])
    params = plan.planned_params(values)
    assert (params.input.length, params.input.batch_rows) == (16, 3)
    assert params.name == "open_models.llama"


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        (["--topology=cpu:4"], 8),
        (["--topology=v5p:2x2x4"], 16),
        (["--topology=v5p:2x2x4", "--mesh=data=8,model=2", "--strategy=tensor"], 8),
        (["--topology=v5p:2x2x3"], 12),
        (["--topology=v5p:2x2x4", "--gin_param=step.micro_batches = 2"], 32),
        (["--topology=v5p:2x2x4", "--gin_param=input.batch_rows = 8"], 8),
        (["--topology=v5p:2x2x4,v5p:2x4x4", "--search"], 32),
        (["--topology=v5p:2x2x4", "--generate"], 8),
    ],
)
def test_a_config_has_rows_that_the_mesh_splits_evenly(run_here, flags, rows):
    values = plan.define_flags()
    values(["gshard-plan", "--config=model", *flags])
    assert plan.planned_params(values).input.batch_rows == rows


def test_a_config_of_packed_tensors_can_be_planned(run_here, tmp_path):
    path = tmp_path / "model" / "config.json"
    packed = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(packed))
    values = plan.define_flags()
    values(["gshard-plan", "--config=model", "--generate"])
    assert plan.planned_params(values).step.precision == "bfloat16_weights"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config=model", "--experiment=test.tiny"], "both say what to plan; give one of them"),
        (["--experiment=test.tiny", "--length=16"], "--length=16 applies to --config, which is no"),
        (["--config=nowhere"], "nowhere: there is no such file"),
    ],
)
def test_flags_of_a_plan_that_do_not_go_together(flags, message, run_here):
    code, _, err = run_here(["gshard-plan", *flags, "--topology=cpu:1"], plan.main)
    assert code == 1 and message in err


@pytest.mark.slow
def test_all_commands_go_on_from_an_import(run_here, tmp_path, monkeypatch):
    flags = ["--length=16", "--gin_param=input.batch_rows = 4", "--gin_param=run.steps = 2"]
    assert run_here(["i", "--from=model", "--logdir=run", *flags], importing.main)[0] == 0
    (tmp_path / "lines").write_text("w5 w7\n")
    greedy = ["--input=lines", "--temperature=0", "--beam_size=1", "--most_tokens=4"]
    code, out, _ = run_here(["generate", "--logdir=run", *greedy], generate.main)
    assert code == 0 and out.startswith("w5 w7")
    assert run_here(["plan", "--config=model", "--topology=cpu:1"], plan.main)[0] == 0
    flags = ["--config=model", "--topology=cpu:1", "--generate", "--batch=2", "--prompt=8"]
    code, out, _ = run_here(["plan", *flags, "--json=plan.json"], plan.main)
    assert code == 0 and "2 texts of 32 positions" in out
    assert json.loads((tmp_path / "plan.json").read_text())["prompt"] == 8
    assert run_here(["train", "--logdir=run"], train.main)[0] == 0
    assert run_here(["evaluate", "--logdir=run"], evaluate.main)[0] == 0
    out = ["--format=huggingface", "--output=out"]
    assert run_here(["export", "--logdir=run", *out], export.main)[0] == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    start = ["--logdir=lora", "--gin_param=task.lora.rank = 2", "--steps=1"]
    assert run_here(["train", "--init_from=run", *start], train.main)[0] == 0
    start = ["--logdir=direct", "--gin_param=input.batch_rows = 4", "--steps=1"]
    assert run_here(["train", "--init_from=model", *start], train.main)[0] == 0
    out = ["--format=huggingface", "--output=again"]
    assert run_here(["export", "--logdir=direct", *out], export.main)[0] == 0
