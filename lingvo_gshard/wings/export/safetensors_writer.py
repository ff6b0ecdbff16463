"""Writes weights as safetensors: https://github.com/huggingface/safetensors.

    model.safetensors   the weights by path, with their layouts in the metadata
    params.json         every hyperparameter
    vocabulary/         SentencePiece models

Weights of more than a few gigabytes become several files, with an index as Hugging Face's libraries
read it: model-00001-of-00003.safetensors, ..., and model.safetensors.index.json.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterable

import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from lingvo_gshard.core import params_text
from lingvo_gshard.wings.export.decoder import TrainedModel

# The largest file, in bytes. A weight that is larger has a file of its own.
FILE_BYTES = 5 * 10**9


def write(model: TrainedModel, directory: pathlib.Path, file_bytes: int = FILE_BYTES) -> None:
    """Writes a model's weights, in files of limited bytes, Params and vocabularies."""
    groups = _groups(((spec.path, value) for spec, value in model.weights()), file_bytes)
    metadata = _metadata(model)
    file_of = {}
    for number, arrays in enumerate(groups, 1):
        name = "model.safetensors"
        if len(groups) > 1:
            name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save(directory / name, arrays, metadata)
        file_of |= dict.fromkeys(arrays, name)
    if len(groups) > 1:
        index = {"metadata": {"total_size": model.nbytes}, "weight_map": file_of}
        text = msgspec.json.format(msgspec.json.encode(index), indent=1)
        (directory / "model.safetensors.index.json").write_bytes(text)
    (directory / "params.json").write_text(params_text.to_json(model.params), encoding="utf-8")
    if model.input.vocabulary_sizes():
        model.input.save_vocabularies(str(directory / "vocabulary"))


def _metadata(model: TrainedModel) -> dict[str, str]:
    """Returns the metadata of each file: texts by name."""
    layouts = {spec.path: spec.layout for spec, _ in model.weights()}
    return {
        "experiment": model.params.name,
        "step": str(model.step),
        "weights": "averages over steps" if model.averaged else "of the step",
        "layouts": msgspec.json.encode(layouts).decode(),
    }


def _groups(
    weights: Iterable[tuple[str, np.ndarray]], file_bytes: int
) -> list[dict[str, np.ndarray]]:
    """Returns the weights of each file, path -> array, in order."""
    groups: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for path, value in weights:
        if groups[-1] and size + value.nbytes > file_bytes:
            groups.append({})
            size = 0
        groups[-1][path] = value
        size += value.nbytes
    return groups


def save(path: pathlib.Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes arrays by name into one file, with texts by name. Raises OSError if it cannot."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    try:
        safetensors.numpy.save_file(contiguous, path, metadata)
    except safetensors.SafetensorError as error:
        # "Error while serializing: I/O error: No space left on device (os error 28)"
        found = re.search(r"\(os error (\d+)\)", str(error))
        if not found:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from None
