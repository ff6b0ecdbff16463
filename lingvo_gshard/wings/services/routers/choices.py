"""Choices: records the choices of a run's routers in files, and replays recorded ones.

A recorded step first computes its choices in a forward pass of its own, and then takes exactly
these, as a replay does. So a replay in the same precision is equal to the bit.
"""

from __future__ import annotations

import io
import pathlib

import numpy as np

from lingvo_gshard.core import Layer, UserError, atomic, processes
from lingvo_gshard.data import Batch
from lingvo_gshard.layers import Execution, MixtureOfExperts
from lingvo_gshard.training import ObservedRun, StepObserver
from lingvo_gshard.wings.services.determinism import batch_digest
from lingvo_gshard.wings.services.routers import replayed
from lingvo_gshard.wings.services.routers.counts import watched_batch, watched_layers
from lingvo_gshard.wings.services.run_options import CHOICES

# The folder of a log directory, and its file of a step.
CHOICES_FOLDER, _FILE = "choices", "step-{:08d}.npz"
_DIGEST, _EXPERTS, _KEPT = "batch_digest", "/experts", "/kept"


class Choices(StepObserver):
    """Adds recorded choices to the batches of steps, and writes the choices of steps."""

    def __init__(self, run: ObservedRun):
        """Checks that the run can record or replay. Raises UserError if it cannot."""
        p = run.params.run
        self._run, self._first_and_last = run, tuple(p.record_choices)
        self._folder = run.logdir.path / CHOICES_FOLDER
        self._option = "run.replay_choices" if p.replay_choices else "run.record_choices"
        self._check_model()
        self._replayed: dict[int, pathlib.Path] = {}
        if p.replay_choices:
            folder = pathlib.Path(p.replay_choices) / CHOICES_FOLDER
            self._replayed = {int(f.stem[5:]): f for f in sorted(folder.glob("step-*.npz"))}
            if not self._replayed:
                raise UserError(
                    f"run.replay_choices={p.replay_choices!r}: {folder} has no recorded choices; "
                    "the log directory of a run with run.record_choices was expected"
                )
        self._batch: Batch = {}
        run.trainer.gradients.around = replayed.replaying

    def before_step(self, step: int, batch: Batch) -> None:
        """Adds the choices of the step to the batch, and records them, as the run asks for."""
        if self._replayed and step - 1 == max(self._replayed):
            self._run.say(f"step {step:,}: the replay of routers' choices has ended")
        is_recorded = bool(self._first_and_last) and (
            self._first_and_last[0] <= step <= self._first_and_last[1]
        )
        if not is_recorded and step not in self._replayed:
            return
        rows, digest = len(next(iter(batch.values()))), batch_digest(batch)
        codes: replayed.Codes = self._read(step, digest) if step in self._replayed else {}
        if is_recorded:
            codes = self._recorded(step, {**batch, **replayed.arrays(rows, codes)}, rows)
            self._write(step, digest, codes)
        batch.update(replayed.arrays(rows, codes))
        self._batch = batch

    def after_start(self, step: int) -> None:
        """Removes the choices from the batch, which others digest."""
        for name in [name for name in self._batch if name.startswith(CHOICES)]:
            del self._batch[name]
        self._batch = {}

    def _recorded(self, step: int, batch: Batch, rows: int) -> replayed.Codes:
        """Returns the choices that the routers make, or replay, in a step."""
        run = self._run
        measured = watched_batch(batch, None, step)[1]
        with run.working("computing the choices of the routers"):
            function = replayed.RecordedChoices(run.trainer, rows)
            codes = replayed.codes_of(run.runtime.measure("choices", function, measured)())
        wrong = codes.keys() ^ {f"{path}.router" for path in self._layers}
        if wrong:
            raise UserError(
                f"{self._option}: {min(wrong)} is computed several times in a step, or never; "
                "layers that are computed once were expected"
            )
        return codes

    def _write(self, step: int, digest: int, codes: replayed.Codes) -> None:
        if not processes.is_main():
            return
        found = {_DIGEST: np.array(digest, np.int64)}
        for path in self._layers:
            code = codes[f"{path}.router"]
            found[path + _EXPERTS] = replayed.expert_of(code)
            found[path + _KEPT] = replayed.kept_of(code) == 1
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **found)
        self._folder.mkdir(parents=True, exist_ok=True)
        atomic.replace_file(self._folder / _FILE.format(step), content.getvalue())
        if step == self._first_and_last[1]:
            self._run.say(f"step {step:,}: the routers' choices until here are in {self._folder}")

    def _read(self, step: int, digest: int) -> replayed.Codes:
        file = self._replayed[step]
        with np.load(file) as found:
            recorded = dict(found)
        if int(recorded[_DIGEST]) != digest:
            raise UserError(
                f"{self._option}: step {step:,} has a batch with the digest {digest}, and the "
                f"choices in {file} are those of a batch with the digest "
                f"{int(recorded[_DIGEST])}; the same input and the same seed were expected"
            )
        layers = {name.removesuffix(_EXPERTS) for name in recorded if name.endswith(_EXPERTS)}
        if layers != self._layers.keys():
            raise UserError(
                f"{self._option}: {file} has the choices of {', '.join(sorted(layers))}; those of "
                f"{', '.join(sorted(self._layers))} were expected"
            )
        codes = {}
        for path, layer in self._layers.items():
            expert, kept = recorded[path + _EXPERTS], recorded[path + _KEPT]
            if expert.max() >= layer.p.num_experts:
                raise UserError(
                    f"{self._option}: {file} has expert {expert.max()} in {path}, which has "
                    f"num_experts={layer.p.num_experts}"
                )
            codes[f"{path}.router"] = replayed.code_of(expert, kept).astype(np.int32)
        return codes

    def _check_model(self) -> None:
        """Finds the layers with experts."""
        task = self._run.trainer.task
        self._layers: dict[str, MixtureOfExperts] = watched_layers(task)
        if not self._layers:
            raise UserError(f"{self._option}: the model has no layer with experts")
        for path, layer in self._layers.items():
            if not layer.router.capacity.tokens_choose:
                raise UserError(
                    f"{self._option}: the {type(layer.router).__name__} of {path} lets experts "
                    "choose tokens; a router whose tokens choose experts was expected"
                )
        _check_executions(task, self._option)
        if self._run.trainer.p.local_updates.every:
            raise UserError(f"{self._option} with step.local_updates.every: 0 was expected")


def _check_executions(layer: Layer, option: str) -> None:
    """Raises UserError if a layer runs in the stages of a pipeline."""
    if isinstance(layer, Execution) and "stages" in layer.p:
        raise UserError(
            f"{option}: {layer.path} is a {type(layer).__name__}, whose stages compute all layers "
            "as one; Sequential or Repeat was expected"
        )
    for child in layer.child_layers():
        _check_executions(child, option)
