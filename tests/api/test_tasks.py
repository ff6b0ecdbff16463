"""Tests that lm-evaluation-harness has the same numbers on a run, a server, and transformers."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import lingvo_gshard as gshard
from benchmarks.peer_python import find_python
from lingvo_gshard.api.tasks import TaskOptions, TaskScores, evaluate_on_tasks
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.serving.model import ServedModel
from lingvo_gshard.serving.service import Service
from tests.open_models import published
from tests.serving.conftest import PATIENT
from tests.serving.open_server import open_server

PROCESS = pathlib.Path(__file__).with_name("harness_process.py")
_COMMON = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
_TASKS = {
    "tiny_choice": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_answer": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["w9"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "tiny_text": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


def write_tasks(folder):
    """Writes three tasks with 24 questions in the words of the small model."""
    folder.mkdir()
    rng = np.random.default_rng(1)

    def words(count):
        return " ".join(f"w{i}" for i in rng.integers(4, published.VOCABULARY, count))

    rows = [
        {
            "question": words(rng.integers(2, 12)),
            "choices": [words(rng.integers(1, 4)) for _ in range(4)],
            "answer": int(rng.integers(4)),
        }
        for _ in range(24)
    ]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in _TASKS.items():
        common = _COMMON.format(file=file)
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{common}{text}")


@pytest.mark.slow
def test_numbers_are_equal_on_a_run_a_server_and_transformers(tmp_path):
    python = find_python(
        os.environ.get("PEERS_PYTHON"), ("lm_eval", "transformers", "aiohttp", "aiosignal")
    )
    if not python:
        pytest.skip("lm-eval is not installed, and PEERS_PYTHON names no Python with it")
    directory, logdir = tmp_path / "model", tmp_path / "run"
    published.write(directory)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    settings |= {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    gshard.import_model(directory, logdir, length=32)
    tasks = tmp_path / "tasks"
    write_tasks(tasks)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([python, "-c", where], text=True).strip()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {"HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()}

    def scores(kind, what, *more, program=python):
        path = tmp_path / f"{kind}.json"
        command = [program, PROCESS, kind, str(what), str(tasks), str(path), *more]
        subprocess.run(command, check=True, env=environment, cwd=tmp_path)
        return json.loads(path.read_text())

    expected = scores("transformers", directory)
    assert {*expected} == {*_TASKS}
    assert len({value for task in expected.values() for value in task.values()}) > 4
    found = {"run": scores("run", logdir, packages, program=sys.executable)}
    served = ServedModel.of_run(gshard.load(logdir))
    with open_server(Service(served, PATIENT)) as opened:
        url = f"http://127.0.0.1:{opened.port}/v1/completions"
        found["server"] = scores("server", url, str(directory))
    for kind, results in found.items():
        for task, values in results.items():
            for metric, value in values.items():
                if "stderr" not in metric:
                    where, wanted = (kind, task, metric), expected[task][metric]
                    assert value == pytest.approx(wanted, rel=2e-5, abs=5e-5), where


def test_a_missing_harness_or_folder_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install lm-eval"):
        evaluate_on_tasks(None, TaskOptions(("arc_easy",)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(UserError, match="there is no such directory"):
        evaluate_on_tasks(None, TaskOptions(("arc_easy",), folder=str(tmp_path / "none")))


def test_scores_are_shown_with_their_errors():
    results = {"t": {"acc,none": 0.5, "acc_stderr,none": 0.1, "perplexity,none": 2.0}}
    found = TaskScores(results, {"t": 24}, {"t": 1})
    rows = [("t", "acc", "0.5000", "0.1000", "24"), ("t", "perplexity", "2.0000", "", "24")]
    assert list(found.table().rows) == rows and found.size == "24 questions"
    assert found.to_record()["results"] == results
