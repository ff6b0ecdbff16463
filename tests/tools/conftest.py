"""Trains small models on synthetic text for tests of commands that read runs."""

import pytest

from lingvo_gshard.tools import train
from tests.tools import tiny_language_model, tiny_translation


@pytest.fixture(scope="session")
def trained_logdir(tmp_path_factory):
    """Returns the directory of a small translation model, trained for a few steps.

    After training, a line of the dev split is damaged: it lacks a column.
    """
    directory = tmp_path_factory.mktemp("trained")
    arguments = tiny_translation.write(directory)
    logdir = directory / "run"
    train.main(["gshard-train", *arguments, f"--logdir={logdir}", "--steps=20"])
    (directory / "dev.tsv").write_text("de\tHund\n", encoding="utf-8")
    return logdir


@pytest.fixture(scope="session")
def language_model_logdir(tmp_path_factory):
    """Returns the directory of a tiny language model, trained for some steps."""
    directory = tmp_path_factory.mktemp("language_model")
    flags = tiny_language_model.write(directory)
    train.main(["gshard-train", *flags, f"--logdir={directory}/run", "--steps=30"])
    return directory / "run"
