# tests: tasks/task.py, /docs/extending.md
"""Tests that the three files of docs/extending.md add a task."""

import io
import sys

import pytest
import rich.console

import lingvo_gshard as gshard
from lingvo_gshard.core.config import registry
from lingvo_gshard.data import EmbeddedCorpus
from lingvo_gshard.tools.benchmarks import step
from tests import test_docs

PAGE = test_docs.ROOT / "docs" / "extending.md"
NAME = "language_id.experiment.small"
SETTINGS = ["task.model_dim = 16", "task.encoder.num_heads = 2", "input.length = 16"]


@pytest.fixture(scope="module")
def _corpus_is_read_once():
    """Keeps the rows of the embedded corpus, which the page's input reads anew at each start."""
    corpus = EmbeddedCorpus.params().instantiate()
    kept = {split: corpus.rows(split) for split in corpus.splits}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(EmbeddedCorpus, "rows", lambda self, split: kept[split])
        yield


@pytest.fixture(scope="module")
def experiment(tmp_path_factory, _corpus_is_read_once):
    """Returns the Params of the page's experiment, looked up by name."""
    folder = tmp_path_factory.mktemp("mine")
    files = test_docs.write_files(PAGE.read_text(encoding="utf-8"), folder)
    ours = [path.name for path in files if path.parent.name == "language_id"]
    assert ours == ["task.py", "input.py", "experiment.py"]
    sys.path.append(str(folder))
    yield gshard.experiment(NAME, SETTINGS)
    sys.path.remove(str(folder))
    registry._EXPERIMENTS._features.pop(NAME)
    for module in [name for name in sys.modules if name.partition(".")[0] == "language_id"]:
        del sys.modules[module]


@pytest.mark.slow
def test_trains_resumes_and_evaluates(experiment, tmp_path):
    quiet = rich.console.Console(file=io.StringIO())
    gshard.train(experiment, tmp_path / "run", steps=4, console=quiet)
    gshard.train(experiment, tmp_path / "run", steps=60, console=quiet)
    run = gshard.load(tmp_path / "run")
    losses = [row["loss"] for row in run.metrics()]
    assert len(losses) == 60 and sum(losses[-10:]) < 0.95 * sum(losses[:10])
    scores = run.evaluate("test").to_record()
    assert 0 <= scores["accuracy"] <= 1 and scores["perplexity"] > 1
    assert run.params.task.cls.__name__ == "LanguageIdTask"


@pytest.mark.slow
def test_can_be_planned(experiment):
    plan = gshard.plan(experiment, "cpu:8")
    task = experiment.input.cls.configured_vocabulary_sizes(experiment.input)
    assert task == {"languages": 4}
    assert plan.tokens_per_step == 32 * 16 and plan.flops.useful > 0


def test_can_be_benchmarked(experiment):
    with_experts, dense = step.experiment_cases(experiment)
    assert [case.name for case in (with_experts, dense)] == [f"{NAME}, experts", f"{NAME}, dense"]
    assert with_experts.batch["language"].max() < 4
    assert with_experts.flops > dense.flops > 0
