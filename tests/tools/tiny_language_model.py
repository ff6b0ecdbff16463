"""A language model on synthetic text that trains in seconds."""

import pathlib

from tests.data import corpora


def write(directory: pathlib.Path, **settings: object) -> list[str]:
    """Writes text and a gin file into a directory, and returns the flags that name them.

    settings: Params of the input and the task by path, dots as double underscores.
    """
    for split, count in (("train", 200), ("dev", 10), ("test", 30)):
        lines = "\n".join(row.target for row in corpora.rows(count))
        (directory / f"{split}.txt").write_text(lines)
    values = {f"input.corpus.{s}": (f"{directory}/{s}.txt",) for s in ("train", "dev", "test")}
    values |= {"input.vocabulary.cache_directory": f"{directory}/cache", **_SMALL}
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    path = directory / "small.gin"
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in values.items()))
    return ["--experiment=language_model.from_files", f"--gin_file={path}"]


_SMALL = {
    "input.corpus.document": "line",
    "input.vocabulary.size": 280,
    "input.batch_rows": 8,
    "input.length": 16,
    "task.model_dim": 16,
    "task.decoder.num_layers": 1,
    "task.decoder.moe_every": 1,
    "task.decoder.hidden_dim": 16,
    "task.decoder.moe.num_experts": 4,
    "task.decoder.moe.router.evaluation_capacity_factor": 4.0,
    "task.decoder.moe.group_size": 16,
    "step.schedule.warmup_steps": 5,
}
