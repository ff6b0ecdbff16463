# tests: tasks/task.py, tools/evaluate.py, tools/generate.py, tools/export.py
"""Tests that one class adds a task that decodes: it is trained, evaluated, generated and exported.

The task below scores what it writes, which no task of the package does. It names no command.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from lingvo_gshard.core.config import registry
from lingvo_gshard.tasks import Decoding, Evaluation, LanguageModelTask, Table
from lingvo_gshard.tools import evaluate, export, generate, train
from tests.tools import tiny_language_model

MODULE = __name__


@dataclasses.dataclass(frozen=True)
class Lengths(Evaluation):
    """The words that the model adds to the first word of each text."""

    words: tuple[int, ...]

    @property
    def size(self) -> str:
        return f"{len(self.words)} texts"

    def table(self):
        return Table(("texts", "words"), [(str(len(self.words)), str(sum(self.words)))])

    def to_record(self):
        return {"words": list(self.words)}


class Completer(LanguageModelTask):
    """A language model that is scored by what it writes after the first word of each text."""

    DECODING = Decoding(has_source=False, beam_size=2, is_evaluated=True)
    EVALUATION_OPTIONS = ()
    HAS_OUTPUT_ROWS = False

    def evaluate(self, runtime, input_, split, progress=None, *, write):
        first = [row.target.split()[0] for row in input_.rows(split)]
        return Lengths(tuple(len(found.texts[0].split()) for found in write(first)))


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completer")
    flags = tiny_language_model.write(folder, task__decoder__num_heads=2)
    gin = folder / "small.gin"
    gin.write_text(f"task = @{MODULE}.Completer\n" + gin.read_text())
    registry.import_module(MODULE)
    assert train.main(["gshard-train", *flags, f"--logdir={folder}/run", "--steps=3"]) == 0
    return folder / "run"


@pytest.mark.slow
def test_it_is_evaluated_by_what_it_writes(logdir, tmp_path):
    file = tmp_path / "scores.json"
    command = ["gshard-evaluate", f"--logdir={logdir}", "--split=dev", f"--json={file}"]
    assert evaluate.main([*command, "--most_tokens=5", f"--import={MODULE}"]) == 0
    words = json.loads(file.read_text())["words"]
    assert len(words) == 10 and max(words) > 0


def test_it_continues_texts(logdir, tmp_path, capsys):
    lines = tmp_path / "lines.txt"
    lines.write_text("one\ntwo\n")
    command = ["gshard-generate", f"--logdir={logdir}", f"--input={lines}", "--most_tokens=4"]
    assert generate.main([*command, f"--import={MODULE}"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_it_is_exported_with_its_own_search(logdir, tmp_path):
    command = ["gshard-export", f"--logdir={logdir}", "--format=stablehlo"]
    out = tmp_path / "out"
    sizes = ["--rows=1", "--lengths=8", "--most_tokens=4"]
    assert export.main([*command, f"--output={out}", *sizes, f"--import={MODULE}"]) == 0
    assert json.loads((out / "model.json").read_text())["beam_size"] == 2
