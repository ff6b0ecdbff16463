"""Computes models of transformers, in a process without lingvo_gshard and TensorFlow.

    python variant_process.py

The program answers each line of standard input. VALUES are a JSON object, as in config.json:

    make VALUES DIR   writes the model and the logits into DIR; answers "computed", or
                      the name of the error
    differs VALUES    answers whether the model last made computes something else: True or False
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pathlib
import sys
import zlib
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.parity.peer_process import (
    OUTPUTS,
    draw_experts,
    language_model,
    run_all_experts,
)

_ROWS, _LENGTH = 2, 20
# Differences of logits of about 5 that rounding makes.
_NEAR_ENOUGH = 1e-5


@dataclasses.dataclass
class Outcome:
    """The results of a model of a config.

    Attributes:
      shapes: name of each weight -> its shape.
      logits: of a batch, in evaluation.
      loss: of a training step, with the random numbers of one seed.
      model: the model.
      ids: the batch; the targets of a translation are the sources from the last to the first.
    """

    shapes: dict[str, tuple[int, ...]]
    logits: torch.Tensor
    loss: float
    model: Any
    ids: torch.Tensor

    def equals(self, other: Outcome) -> bool:
        """Returns whether another config computes the same."""
        return (
            self.shapes == other.shapes
            and self.logits.shape == other.logits.shape
            and bool(torch.allclose(self.logits, other.logits, atol=_NEAR_ENOUGH, rtol=0))
            and abs(self.loss - other.loss) < _NEAR_ENOUGH
        )


def set_weights(model: Any) -> None:
    """Gives each weight values that depend on its name and shape alone, but for sinusoids."""
    biases = ("e_score_correction_bias", "final_logits_bias", "layer_scalar")
    buffers = [each for each in model.named_buffers() if each[0].endswith(biases)]
    trained = [each for each in model.named_parameters() if each[1].requires_grad]
    with torch.no_grad():
        for name, weight in (*trained, *buffers):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn * 0.15 if weight.dim() > 1 else 1 + drawn * 0.1)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                draw_experts(table, model.config.n_routed_experts, generator)


def compute(config: Any, is_translation: bool) -> Outcome:
    """Makes a model of a config, and runs it."""
    torch.set_num_threads(1)
    auto = transformers.AutoModelForSeq2SeqLM if is_translation else language_model()
    model = auto.from_config(config, attn_implementation="eager")
    set_weights(model)
    ids = torch.randint(3, 300, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids}
    if is_translation:
        given["decoder_input_ids"] = ids.flip(1)
    with torch.inference_mode():
        logits = model.eval()(**given, return_dict=True).logits.float()
    torch.manual_seed(2)
    loss = model.train()(**given, labels=ids, return_dict=True).loss.item()
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return Outcome(shapes, logits, loss, model, ids)


def _outcome(values: dict[str, Any]) -> Outcome:
    """Returns what the values of a config compute.

    Raises:
      ArithmeticError: that is no number.
    """
    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values))
    found = compute(config, bool(config.is_encoder_decoder))
    if not torch.isfinite(found.logits).all():
        raise ArithmeticError
    return found


class _Answers:
    """Answers requests."""

    def __init__(self) -> None:
        self._last: Outcome | None = None

    def make(self, values: str, directory: str) -> str:
        """Writes a model and its logits."""
        folder = pathlib.Path(directory)
        try:
            self._last = found = _outcome(json.loads(values))
            found.model.save_pretrained(folder)
        except Exception as error:  # transformers raises errors of all kinds.
            return type(error).__name__
        np.savez(folder / OUTPUTS, logits=found.logits.numpy(), ids=found.ids.numpy())
        return "computed"

    def differs(self, values: str) -> str:
        """Returns whether the last model differs from a model of other values, or whether only the
        last one can be computed."""
        assert self._last
        try:
            return str(not self._last.equals(_outcome(json.loads(values))))
        except Exception:
            return str(True)


def main() -> None:
    """Answers until standard input ends."""
    logging.disable(logging.CRITICAL)
    run_all_experts()
    answers, sys.stdout = sys.stdout, sys.stderr
    own = _Answers()
    for line in sys.stdin:
        request, *fields = line.rstrip("\n").split("\t")
        answer = {"make": own.make, "differs": own.differs}[request](*fields)
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
