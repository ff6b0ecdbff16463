"""The experiment that the soak runner trains: translation.quickstart, cut to compile in seconds."""

import lzma
import pathlib

import lingvo_gshard

LANGUAGES = ("es", "pt", "pt_BR", "it", "ca", "fr", "de", "nl", "sv", "gl")
EVALUATE_EVERY = 20
CHECKPOINT_EVERY = 5

_ROWS = {"train": 400, "dev": 16, "test": 16}
_SETTINGS = {
    "task.model_dim": 16,
    "task.encoder.num_layers": 1,
    "task.encoder.num_heads": 2,
    "task.encoder.hidden_dim": 32,
    "task.encoder.moe_every": 1,
    "task.encoder.moe.group_size": 32,
    "task.encoder.moe.num_experts": 4,
    "task.decoder.num_layers": 1,
    "task.decoder.num_heads": 2,
    "task.decoder.hidden_dim": 32,
    "task.decoder.moe_every": 0,
    "input.batch_rows": 8,
    "input.source_length": 32,
    "input.target_length": 32,
    "input.vocabulary.size": 400,
    "input.packing_window": 256,
    "step.schedule.total_steps": 1_000_000,
    "step.schedule.warmup_steps": 20,
    "run.checkpoint_every_steps": CHECKPOINT_EVERY,
    "run.evaluate_every_steps": EVALUATE_EVERY,
    "run.log_every_steps": 10,
}


def write(directory: pathlib.Path, **settings: object) -> list[str]:
    """Writes a cut of the quickstart's corpus and a gin file.

    Args:
      directory: where the files go.
      settings: more Params by path, dots as double underscores.

    Returns:
      The flags that name the experiment and its files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    values: dict[str, object] = {"input.vocabulary.cache_directory": f"{directory}/vocabularies"}
    lines = _short_rows()
    for split, count in _ROWS.items():
        path = directory / f"{split}.tsv"
        path.write_text("".join(next(lines) for _ in range(count)), encoding="utf-8")
        values[f"input.corpus.{split}"] = (str(path),)
    values |= _SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}
    gin = directory / "soak.gin"
    gin.write_text("".join(f"{name} = {value!r}\n" for name, value in values.items()))
    return ["--experiment=translation.from_files", f"--gin_file={gin}"]


def _short_rows():
    """Yields rows of the embedded dev split that fit into a row of a batch."""
    path = pathlib.Path(lingvo_gshard.__file__).parent / "data" / "embedded" / "dev.tsv.xz"
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            if line.partition("\t")[0] in LANGUAGES and len(line) < 80:
                yield line
