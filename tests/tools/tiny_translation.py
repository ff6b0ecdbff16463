"""A translation experiment on synthetic text that trains in seconds."""

import pathlib

from tests.data import corpora


def write(directory: pathlib.Path, **settings: object) -> list[str]:
    """Writes a corpus and a gin file into a directory, and returns the flags that name them.

    settings: Params of the input and the task by path, dots as double underscores.
    """
    for split, rows in (("train", 200), ("test", 50), ("dev", 10)):
        corpora.write(directory / f"{split}.tsv", rows)
    values = {f"input.corpus.{split}": (f"{directory}/{split}.tsv",) for split in _SPLITS}
    values |= {"input.vocabulary.cache_directory": f"{directory}/cache", **_SMALL}
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    path = directory / "small.gin"
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in values.items()))
    return ["--experiment=translation.from_files", f"--gin_file={path}"]


_SPLITS = ("train", "dev", "test")
_SMALL = {
    "input.vocabulary.size": corpora.SIZE,
    "input.batch_rows": 4,
    "input.source_length": 64,
    "input.target_length": 64,
    "task.model_dim": 16,
    "task.encoder.num_layers": 1,
    "task.decoder.num_layers": 1,
    "task.encoder.hidden_dim": 32,
    "task.decoder.hidden_dim": 32,
    "task.encoder.moe_every": 1,
    "task.decoder.moe_every": 1,
    "step.schedule.warmup_steps": 5,
}
