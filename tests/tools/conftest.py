"""A run of gshard-train on made text, for the tools that use what it leaves."""

import pytest

from lingvo_gshard.tools import train
from tests.data import corpora


@pytest.fixture(scope="session")
def trained_logdir(tmp_path_factory):
    """Returns the directory of a small translation model, trained for a moment.

    Since the training, a line of the dev split has lost a column.
    """
    directory = tmp_path_factory.mktemp("trained")
    corpora.write(directory / "train.tsv", 200)
    corpora.write(directory / "test.tsv", 50)
    corpora.write(directory / "dev.tsv", 10)
    settings = f"""
        input.corpus.train = ("{directory}/train.tsv",)
        input.corpus.dev = ("{directory}/dev.tsv",)
        input.corpus.test = ("{directory}/test.tsv",)
        input.vocabulary.size = {corpora.SIZE}
        input.vocabulary.cache_directory = "{directory}/cache"
        input.batch_rows = 4
        input.source_length = 64
        input.target_length = 64
        task.model_dim = 16
        task.encoder.num_layers = 1
        task.decoder.num_layers = 1
        task.encoder.hidden_dim = 32
        task.decoder.hidden_dim = 32
        task.encoder.moe_every = 1
        task.decoder.moe_every = 1
        trainer.schedule.warmup_steps = 5
    """
    (directory / "small.gin").write_text("\n".join(map(str.strip, settings.splitlines())))
    logdir = directory / "run"
    arguments = ["--experiment=translation.from_files", f"--gin_file={directory}/small.gin"]
    train.main(["gshard-train", *arguments, f"--logdir={logdir}", "--steps=20"])
    (directory / "dev.tsv").write_text("de\tHund\n", encoding="utf-8")
    return logdir
