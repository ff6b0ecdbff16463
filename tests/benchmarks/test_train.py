# tests: /benchmarks/train/
"""python -m benchmarks train: work, scores, rows, our records, and other libraries on few rows."""

import dataclasses
import itertools
import json
import os
import sys

import numpy as np
import pytest
import sacrebleu

from benchmarks import __main__ as benchmarks
from benchmarks.decode.sizes import DenseSizes, dense_sizes
from benchmarks.peer_python import has_libraries
from benchmarks.train import command, measure, settings
from benchmarks.train.peers import Peers
from lingvo_gshard.api.saved_run import SavedRun
from lingvo_gshard.core.config import registry
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.data import Row, TranslationInput
from lingvo_gshard.tools import train
from lingvo_gshard.tools.console import Console
from lingvo_gshard.training.experiments import with_configured_vocabularies
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.loading import facts_of
from lingvo_gshard.wings.services import run_records
from tests.tools import tiny_translation

WORDS = {"uno": "one", "dos": "two", "tres": "three", "rojo": "red", "gato": "cat", "casa": "house"}


def made_rows(count: int, seed: int) -> list[Row]:
    """Returns sentences of some words, word by word translated, in two languages."""
    draw, rows = np.random.default_rng(seed), []
    for index in range(count):
        words = draw.choice(list(WORDS), draw.integers(2, 7))
        language = ("es", "gl")[index % 2]
        rows.append(Row(language, " ".join(words), " ".join(WORDS[word] for word in words)))
    return rows


def test_the_work_of_a_dense_model_is_thrice_its_forward_pass():
    params = registry.get("translation.quickstart_dense")
    task = with_configured_vocabularies(params).instantiate()
    sizes = dense_sizes(task, facts_of(task, params.input))
    assert sizes.encoder_hidden == 768
    found = measure.training_flops(sizes, np.array([[5, 7], [9, 2]]))
    shapes = [TokenShape(1, target, source) for source, target in ((5, 7), (9, 2))]
    assert found == 3 * sum(flops(task, shape) for shape in shapes)


def test_short_settings_have_the_work_of_the_quickstart():
    params = registry.get("translation.quickstart_dense")
    task = with_configured_vocabularies(params).instantiate()
    dense, lengths = dense_sizes(task, facts_of(task, params.input)), np.array([[16, 11]])
    for setting in settings.SETTINGS:
        if setting.name == "short":
            found = measure.training_flops(setting.sizes, lengths)
            assert found == measure.training_flops(dense, lengths)


def test_scores_are_means_over_languages():
    rows = made_rows(60, seed=1)
    translations = [row.target if row.language == "es" else row.source for row in rows]
    found = measure.score(rows, translations)
    galician = [row for row in rows if row.language == "gl"]
    texts, references = ([getattr(row, side) for row in galician] for side in ("source", "target"))
    assert found.chrf == pytest.approx(
        (100 + sacrebleu.corpus_chrf(texts, [references]).score) / 2, abs=1e-6
    )
    assert found.bleu == pytest.approx(
        (100 + sacrebleu.corpus_bleu(texts, [references], force=True).score) / 2, abs=1e-6
    )


def test_the_table_shows_means_and_spreads():
    one = measure.Training("marian", "short", "seed 1", 10, 100, 60.0, 3000, 20, 40.0, 20.0)
    other = dataclasses.replace(one, steps=200, seconds=120.0, gflops=30, chrf=43.0, bleu=21.0)
    alone = dataclasses.replace(one, library="joeynmt", chrf=10.0)
    console = Console(record=True, width=120)
    measure.print_table(console, [one, other, alone])
    lines = [line.split() for line in console.export_text().splitlines()]
    figures = ["0.0M", "1.5", "150", "3,000", "25", "41.5", "(3.0)", "20.5", "(1.0)"]
    assert ["marian", "short", *figures] in lines
    assert ["joeynmt", "short", "0.0M", "1.0", "100", "3,000", "20", "10.0", "20.0"] in lines


def test_each_setting_trains_with_each_seed(monkeypatch, tmp_path):
    asked = []

    class Peers:
        def __init__(self, folder, rows):
            assert [len(rows[split]) for split in ("train", "dev", "test")] == [3, 2, 1]

        def train(self, python, setting, minutes, seed, threads):
            asked.append((python, setting.name, minutes, seed, threads))
            return measure.Training(
                "marian", setting.name, str(seed), 1, 1, 1.0, 1.0, 1.0, 2.0, 3.0
            )

    def rows_of(self, split):
        return made_rows({"train": 3, "dev": 2, "test": 1}[split], 1)

    monkeypatch.setattr(command, "Peers", Peers)
    monkeypatch.setattr(command, "find_python", lambda given, modules: given)
    monkeypatch.setattr(TranslationInput, "rows", rows_of)
    arguments = ["--libraries=marian", "--seeds=4,5", "--minutes=0.5", "--threads=2"]
    arguments += ["--peers_python=python", f"--json={tmp_path}/rows.json"]
    assert benchmarks.main(["benchmarks", "train", *arguments]) == 0
    settings_and_seeds = itertools.product(("published", "short"), (4, 5))
    assert asked == [("python", name, 0.5, seed, 2) for name, seed in settings_and_seeds]
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["setting"], row["run"]) for row in rows[1:3]] == [
        ("published", "5"),
        ("short", "4"),
    ]


@pytest.mark.slow
def test_our_row_is_read_from_the_records_of_a_run(tmp_path):
    flags, logdir = tiny_translation.write(tmp_path), tmp_path / "run"
    train.main(["gshard-train", *flags, f"--logdir={logdir}", "--steps=4"])
    own = SavedRun(logdir).input.rows("train")
    with pytest.raises(UserError, match="all 12 test rows.*gshard-evaluate --logdir="):
        measure.read_training(str(logdir), own, 12)
    for rows, chrf in ((12, 30.0), (5, 90.0)):
        scores = {"rows": rows, "average": {"translated": {"chrf": chrf, "bleu": 11.0}}}
        row = run_records.EvaluationRow(1.0, 4, "test", "trained", f"{rows} rows", {}, scores)
        run_records.append_evaluation(logdir, row)
    with pytest.raises(UserError, match="not trained on the 1 rows"):
        measure.read_training(str(logdir), own[:1], 12)
    found = measure.read_training(str(logdir), own, 12)
    assert (found.setting, found.steps) == ("translation.from_files", 4)
    assert (found.chrf, found.bleu) == (30.0, 11.0)
    assert found.parameters > 1000 and found.seconds > 0
    # More than 6 operations for each token and each weight of the softmax.
    assert found.gflops > 6 * 16 * 30 * found.tokens_per_second / 2 / 1e9


@pytest.mark.slow
@pytest.mark.parametrize("library", settings.MODULES)
def test_a_library_trains_and_translates(library, tmp_path):
    python = os.environ.get("PEERS_PYTHON") or sys.executable
    if not has_libraries(python, settings.MODULES[library]):
        pytest.skip(f"{library} is not installed, and PEERS_PYTHON names no Python with it")
    rows = {"train": made_rows(1000, 2), "dev": made_rows(20, 3), "test": made_rows(60, 4)}
    peers = Peers(tmp_path, rows, vocabulary_size=30)
    usual = next(each for each in settings.SETTINGS if each.library == library)
    sizes = DenseSizes(32, 4, 2, 64, 2, 64, 30, 3, 512)
    batch_size = {"marian": 16, "joeynmt": 512}[library]
    setting = dataclasses.replace(usual, sizes=sizes, batch_size=batch_size)
    found = peers.train(python, setting, minutes=0.05, seed=1, threads=1)
    assert found.seconds >= 3 and found.steps >= 1
    # Matrices of two encoder and two decoder layers, and a table.
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 64) + 2 * (8 * 32 * 32 + 2 * 32 * 64) + 30 * 32
    assert matrices < found.parameters < 1.2 * matrices
    # A pair has 4 words a side in the mean, most of which are one piece, and the ends. A side of
    # JoeyNMT's batches has 512 tokens with padding.
    least, most = {"marian": (16 * 7, 16 * 14), "joeynmt": (256, 2 * 512)}[library]
    assert least < found.tokens_per_second * found.seconds / found.steps <= most
    assert found.chrf > 0
