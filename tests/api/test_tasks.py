"""Tests that lm-evaluation-harness has the same numbers on a run, a server, and transformers."""

import json
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

import lingvo_gshard as gshard
from benchmarks.peer_python import find_python
from lingvo_gshard.api.options import TaskOptions
from lingvo_gshard.api.tasks import Answering, TaskScores, evaluate_on_tasks
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.serving.model import ServedModel
from lingvo_gshard.wings.serving.service import Service
from tests.open_models import llama_reference, published
from tests.serving import tiny_llamas
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


@pytest.fixture(scope="module", params=("sentencepiece", "bytes"))
def scored(request, tmp_path_factory):
    """Returns (what the harness asks, the tiny Llama that it asks)."""
    folder = tmp_path_factory.mktemp(request.param)
    llama = tiny_llamas.make(folder, request.param)
    return Answering(gshard.load(folder / "run")), llama


def by_hand(llama, given, answer, length=tiny_llamas.LENGTH):
    """Returns the log-probability of tokens after others, by a Llama in NumPy.

    The text is cut in windows as the harness cuts it: each predicts up to `length` tokens.
    """
    whole, total, at = [*given, *answer], 0.0, len(given)
    while at < len(whole):
        end = min(at + length, len(whole))
        window = whole[max(end - length - 1, 0) : end]
        logits = llama_reference.logits(llama.tensors, window[:-1])
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        places = range(len(window) - (end - at), len(window))
        total += sum(logits[place - 1, window[place]] for place in places)
        at = end
    return total


def test_rolling_scores_do_not_predict_the_token_before_all_texts(scored):
    answering, llama = scored
    texts = ["ab b. é", "", "a b " * 30, "<s>ab"]
    asked = [types.SimpleNamespace(args=(text,)) for text in texts]
    found = answering.loglikelihood_rolling(asked)
    bos = [tiny_llamas.BOS]
    for text, value in zip(texts, found, strict=True):
        ids = llama.tokenizer.encode(text, add_special_tokens=False).ids
        ids = ids[1:] if ids[:1] == bos else ids
        assert value == pytest.approx(by_hand(llama, bos, ids), abs=1e-3)
    assert found[1] == 0 and len(llama.tokenizer.encode(texts[2]).ids) > tiny_llamas.LENGTH


@pytest.mark.parametrize(
    "given, answer",
    [
        ([], [6, 7]),
        ([tiny_llamas.BOS], [6, 7]),
        ([tiny_llamas.BOS, 8, 9], [6, 7, 10]),
        ([tiny_llamas.BOS, *[8, 9] * 30], [6, 7, 10]),
        ([], [6, 7, 11] * 20),
        ([8, 9], [6, 7, 11] * 20),
    ],
    ids=str,
)
def test_scores_after_short_long_and_no_contexts(scored, given, answer):
    answering, llama = scored
    ((value, _),) = answering._loglikelihood_tokens([(None, given, answer)])
    expected = by_hand(llama, given or [tiny_llamas.BOS], answer)
    assert value == pytest.approx(expected, abs=1e-3)


def test_equal_requests_that_draw_get_different_texts_and_the_same_ones_again(scored):
    answering, _ = scored
    settings = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 12}
    asked = [types.SimpleNamespace(args=("a b", settings))] * 5
    texts = answering.generate_until(asked)
    assert len(set(texts)) > 1 and answering.generate_until(asked) == texts


def test_a_missing_harness_or_folder_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install lm-eval"):
        evaluate_on_tasks(None, TaskOptions(tasks=("arc_easy",)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(UserError, match="there is no such directory"):
        folder = str(tmp_path / "none")
        evaluate_on_tasks(None, TaskOptions(tasks=("arc_easy",), tasks_folder=folder))


def test_scores_are_shown_with_their_errors():
    results = {"t": {"acc,none": 0.5, "acc_stderr,none": 0.1, "perplexity,none": 2.0}}
    found = TaskScores(results, {"t": 24}, {"t": 1})
    rows = [("t", "acc", "0.5000", "0.1000", "24"), ("t", "perplexity", "2.0000", "", "24")]
    assert list(found.table().rows) == rows and found.size == "24 questions"
    assert found.to_record()["results"] == results
