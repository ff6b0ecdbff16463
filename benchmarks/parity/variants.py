"""Compares configs with random changes of their keys with transformers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.parity.draw import Variant, draw
from benchmarks.parity.peer_process import OUTPUTS
from benchmarks.peer_python import PeerProcess
from lingvo_gshard.core import UserError, context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.progress import Progress
from lingvo_gshard.wings.open_models.config import CONFIG_FILE, PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.families import FAMILIES
from lingvo_gshard.wings.open_models.importing import PublishedModel, weight_specs

EQUAL, REFUSED = "equal", "refused"
FAULTS = NEEDLESS, DIFFERS, CRASH = ("refused without need", "differs", "crash")
# Largest difference of equal logits, relative to the largest logit if that is above 1.
_LARGEST = 1e-3
# Limits the draws of a variant that transformers cannot compute.
_DRAWS = 20


@dataclasses.dataclass(frozen=True)
class VariantOutcome:
    """The outcome of a variant.

    Attributes:
      family: the `model_type`.
      values: the values of its config before the changes.
      changes: the keys that differ, and their values.
      outcome: EQUAL; REFUSED with a message that names a key, without which transformers computes
        something else; or one of FAULTS.
      difference: largest difference of the logits, if they could be compared.
      message: the error.
      draws: how many variants were drawn until transformers computed one.
    """

    family: str
    values: Mapping[str, Any]
    changes: Mapping[str, Any]
    outcome: str
    difference: float | None
    message: str
    draws: int


def measure(
    families: Sequence[str], numbers: range, seed: int, peer: VariantPeer, progress: Progress
) -> Iterator[VariantOutcome]:
    """Yields the outcomes of variants, family after family in turn.

    Args:
      families: the families; variant `n` has the one at `n % len(families)`.
      numbers: the numbers of the variants.
      seed: the seed of all draws.
      peer: runs transformers.
      progress: is told each stage as it begins.
    """
    for number in numbers:
        family = families[number % len(families)]
        progress.begin(f"variant {number}: {family}")
        for attempt in range(_DRAWS):
            variant = draw(family, f"{seed} {number} {attempt}")
            if peer.make(variant.family, {**variant.values, **variant.changes}):
                yield judge(peer, variant, attempt + 1)
                break


class VariantPeer:
    """A process that computes variants with transformers. A context manager.

    Attributes:
      directory: the directory of the model that was made last.
    """

    def __init__(self, python: str, folder: pathlib.Path):
        """Starts the process.

        Args:
          python: the path of a Python that has torch and transformers.
          folder: an empty directory.
        """
        self.directory = folder / "model"
        program = pathlib.Path(__file__).with_name("variant_process.py")
        setup = folder / "setup.json"
        self._process = PeerProcess("transformers", python, str(program), setup, threads=1)

    def __enter__(self) -> VariantPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()

    def make(self, family: str, values: Mapping[str, Any]) -> bool:
        """Writes a model and its logits; returns whether transformers can compute it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        if self._process.ask("make", _json(family, values), self.directory) != "computed":
            return False
        (self.directory / CONFIG_FILE).write_text(json.dumps(values), encoding="utf-8")
        return True

    def differs(self, family: str, values: Mapping[str, Any]) -> bool:
        """Returns whether the model that was made last computes something else."""
        return self._process.ask("differs", _json(family, values)) == str(True)


def _json(family: str, values: Mapping[str, Any]) -> str:
    """Returns the values for transformers, which lacks some families that equal others."""
    return json.dumps({**values, "model_type": FAMILIES[family].keys.same or family})


def judge(peer: VariantPeer, variant: Variant, draws: int) -> VariantOutcome:
    """Compares a model here with the model that transformers made last.

    Args:
      peer: made the model.
      variant: the config of the model.
      draws: see `VariantOutcome`.
    """
    difference, message = None, ""
    try:
        difference = _difference(peer.directory)
        outcome = EQUAL if difference <= _LARGEST else DIFFERS
    except UserError as error:
        message = str(error)
        kept = {k: v for k, v in variant.changes.items() if not _is_named(k, v, message)}
        is_named = len(kept) < len(variant.changes)
        is_needed = is_named and peer.differs(variant.family, {**variant.values, **kept})
        outcome = REFUSED if is_needed else NEEDLESS
    except Exception as error:  # Any error is a finding.
        outcome, message = CRASH, f"{type(error).__name__}: {error}"
    found = variant.values, variant.changes, outcome, difference, message, draws
    return VariantOutcome(variant.family, *found)


def _is_named(key: str, value: Any, message: str) -> bool:
    """Returns whether a message names a key, or a key within its value."""
    names = (key, *(value if isinstance(value, dict) else ()))
    return any(re.search(rf"\b{re.escape(name)}\b", message) for name in names)


def _difference(directory: pathlib.Path) -> float:
    """Returns the largest difference of a model's logits here from its logits in transformers.

    Raises:
      UserError: the model is refused.
    """
    outputs = np.load(directory / OUTPUTS)
    expected, found = outputs["logits"], _logits(directory, outputs["ids"].astype(np.int32))
    if found.shape != expected.shape:
        return float("inf")
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


def _logits(directory: pathlib.Path, ids: np.ndarray) -> np.ndarray:
    params = experiment_of(PublishedConfig.load(directory))
    model, task = PublishedModel.open(directory, params), params.task.instantiate()
    weights, specs = [], weight_specs(params)
    for path, spec in specs.flatten_items():
        weight = np.zeros(spec.shape, np.float32)
        for part in model.parts(path):
            weight[part.index] = part.read()
        weights.append(tf.constant(weight))
    targets = ids[:, ::-1] if "source_vocabulary_size" in params.task else ids
    batch = {"target_inputs": targets, "target_labels": targets, "source_ids": ids}
    for side in ("target", "source"):
        batch[f"{side}_segments"] = np.ones_like(ids)
        batch[f"{side}_positions"] = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
    with context.scope(training=False):
        given = {name: tf.constant(array, tf.int32) for name, array in batch.items()}
        return tf.cast(task.logits(specs.pack(weights), given), tf.float32).numpy()


def count(rows: Collection[VariantOutcome], outcome: str) -> int:
    """Returns how many of some variants have an outcome."""
    return sum(row.outcome == outcome for row in rows)
