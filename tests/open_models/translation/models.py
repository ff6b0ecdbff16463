"""Small published encoder-decoders with random weights, and SentencePiece models for them."""

import functools
import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy
import sentencepiece

from benchmarks.parity.cases import CASES
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.families import FAMILIES
from lingvo_gshard.wings.open_models.importing import weight_specs
from lingvo_gshard.wings.open_models.weight_mapping import WeightMapping

LINES = (
    "the file could not be opened",
    "die Datei konnte nicht geladen werden",
    "close the window and open another one",
    "das Fenster wird nun wieder ganz geschlossen",
)
# Ids of the special pieces: of T5, of fairseq's models, and of Marian's.
SPECIAL = {
    "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "fairseq": {"pad_id": -1, "unk_id": 0, "bos_id": 1, "eos_id": 2},
    "marian": {"pad_id": -1, "eos_id": 0, "unk_id": 1, "bos_id": -1},
}


@functools.cache
def trained(kind: str, size: int = 60, lines: tuple[str, ...] = LINES) -> bytes:
    """Returns a SentencePiece model with the special ids of a kind of models."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "lines.txt").write_text("\n".join(lines))
        sentencepiece.SentencePieceTrainer.Train(
            input=str(path / "lines.txt"),
            model_prefix=str(path / "pieces"),
            vocab_size=size,
            minloglevel=2,
            hard_vocab_limit=False,
            **SPECIAL[kind],
        )
        return (path / "pieces.model").read_bytes()


def case_of(option: str):
    """Returns the case of the parity benchmark with this name."""
    return next(case for case in CASES if case.name == option)


def write(directory: pathlib.Path, option: str, **config) -> dict[str, np.ndarray]:
    """Writes the model of a case of the parity benchmark, without a tokenizer.

    Args:
      directory: a new directory.
      option: name of the case.
      **config: further values of config.json.

    Returns:
      The tensors by name.
    """
    directory.mkdir()
    case = case_of(option)
    values = {"model_type": case.model_type, **case.values, **config}
    (directory / "config.json").write_text(json.dumps(values))
    published = PublishedConfig.load(directory)
    table = FAMILIES[case.model_type].table
    pieces = WeightMapping.of(table, weight_specs(experiment_of(published))).pieces
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(0, 0.2, found[0].published_shape).astype(np.float32)
        for name, found in pieces.items()
    }
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return tensors


def write_t5(directory: pathlib.Path, option: str = "t5, tied and scaled softmax", **config):
    """Writes a T5 with its SentencePiece model and returns its tensors."""
    found = write(directory, option, **config)
    (directory / "spiece.model").write_bytes(trained("t5"))
    return found
