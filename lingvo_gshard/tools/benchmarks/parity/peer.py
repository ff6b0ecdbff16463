"""Runs transformers in a process of its own."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Sequence

from lingvo_gshard.tools.benchmarks.decode.peers import environment
from lingvo_gshard.tools.benchmarks.parity import peer_process
from lingvo_gshard.tools.benchmarks.parity.cases import LENGTH, NEW_TOKENS, ROWS, Case

LIBRARIES = ("torch", "transformers")


class Peer:
    """A process that runs models of transformers. A context manager."""

    def __init__(self, python: str, cases: Sequence[Case], folder: pathlib.Path, threads: int = 1):
        """Starts the process.

        Args:
          python: the path of a Python that has LIBRARIES.
          cases: the models.
          folder: an empty directory for them.
          threads: threads of torch.
        """
        self._folder = folder
        setup = {
            "rows": ROWS,
            "length": LENGTH,
            "new_tokens": NEW_TOKENS,
            "cases": [
                {
                    "number": number,
                    "model_type": case.model_type,
                    "config": case.values,
                    "directory": str(self.directory(number)),
                }
                for number, case in enumerate(cases)
            ],
        }
        (folder / "setup.json").write_text(json.dumps(setup), encoding="utf-8")
        self._errors = open(folder / "errors.txt", "w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [python, peer_process.__file__, str(folder / "setup.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(threads),
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def directory(self, number: int) -> pathlib.Path:
        """Returns the directory of a case's model."""
        return self._folder / f"model-{number}"

    def make(self, number: int) -> None:
        """Writes a case's model, and what it computes, into its directory."""
        self._ask("make", number)

    def load(self, number: int, directory: pathlib.Path) -> float:
        """Loads an exported model; returns the largest difference of its logits to the case's."""
        return float(self._ask("load", number, str(directory)))

    def loss(self, number: int, directory: pathlib.Path, ids: pathlib.Path) -> float:
        """Loads an exported model; returns its cross-entropy per token.

        Args:
          number: the case that the model was made for.
          directory: the exported model.
          ids: a .npy file of int64 ids [rows,length].
        """
        return float(self._ask("loss", number, str(directory), str(ids)))

    def _ask(self, request: str, number: int, *rest: str) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\t".join([request, str(number), *rest]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["it printed nothing"]
            raise ValueError(f"--peers_python: the process of transformers ended: {last[0]}")
        return line.rstrip("\n")
