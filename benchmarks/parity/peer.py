"""Runs transformers in a process of its own."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from benchmarks.parity import peer_process
from benchmarks.parity.case import LENGTH, NEW_TOKENS, PROMPTS, ROWS, Case
from benchmarks.peer_python import PeerProcess

LIBRARIES = ("torch", "transformers")


class Peer:
    """A process that runs models of transformers. A context manager."""

    def __init__(self, python: str, cases: Sequence[Case], folder: pathlib.Path, threads: int = 1):
        """Starts the process.

        Args:
          python: the path of a Python that has LIBRARIES.
          cases: the models.
          folder: an empty directory for the models.
          threads: threads of torch.
        """
        self._folder = folder
        setup = {
            "rows": ROWS,
            "length": LENGTH,
            "new_tokens": NEW_TOKENS,
            "prompts": PROMPTS,
            "cases": [
                {
                    "number": number,
                    "model_type": case.model_type,
                    "config": case.values,
                    "start": list(case.start),
                    "directory": str(self.directory(number)),
                }
                for number, case in enumerate(cases)
            ],
        }
        file = folder / "setup.json"
        file.write_text(json.dumps(setup), encoding="utf-8")
        self._process = PeerProcess("transformers", python, peer_process.__file__, file, threads)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()

    def directory(self, number: int) -> pathlib.Path:
        """Returns the directory of a case's model."""
        return self._folder / f"model-{number}"

    def make(self, number: int) -> None:
        """Writes a case's model, and the model's results, into the directory of the case."""
        self._process.ask("make", number)

    def load(self, number: int, directory: pathlib.Path) -> float:
        """Loads an exported model; returns the largest difference of its logits to the case's."""
        return float(self._process.ask("load", number, directory))

    def loss(self, number: int, directory: pathlib.Path, ids: pathlib.Path) -> float:
        """Loads an exported model; returns its cross-entropy per token.

        Args:
          number: the case that the model was made for.
          directory: the exported model.
          ids: a .npy file of int64 ids [rows,length].
        """
        return float(self._process.ask("loss", number, directory, ids))
