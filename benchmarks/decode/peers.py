"""Runs other engines in a process of their own."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

from benchmarks.decode import peer_process
from benchmarks.decode.measure import Case
from benchmarks.decode.sizes import DenseSizes
from benchmarks.peer_python import PeerProcess
from lingvo_gshard.wings.inference.decoding.precision import INT8, TRAINED

LIBRARIES = ("torch", "transformers", "ctranslate2")


class Peers:
    """A process that decodes with other engines. A context manager.

    Attributes:
      engines: the precision of ours that each is compared with, by name.
    """

    engines = {
        name: INT8 if name == peer_process.CTRANSLATE2_INT8 else TRAINED
        for name in (peer_process.HUGGING_FACE, *peer_process.CTRANSLATE2)
    }

    def __init__(
        self, python: str, models: Mapping[str, DenseSizes], cases: Sequence[Case], threads: int
    ):
        """Starts the process.

        Args:
          python: the path of a Python with the libraries of the extra `peers`.
          models: the sizes of each model that cases name.
          cases: what will be decoded.
          threads: threads of each engine.
        """
        self._cases = list(cases)
        self._directory = tempfile.TemporaryDirectory(prefix="gshard-bench-")
        folder = pathlib.Path(self._directory.name)
        setup = {
            "threads": threads,
            "directory": str(folder),
            "models": {name: dataclasses.asdict(sizes) for name, sizes in models.items()},
            "cases": [dataclasses.asdict(case) for case in cases],
        }
        file = folder / "setup.json"
        file.write_text(json.dumps(setup), encoding="utf-8")
        self._process = PeerProcess("the peers", python, peer_process.__file__, file, threads)

    def __enter__(self) -> Peers:
        self._process.answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()
        self._directory.cleanup()

    def decode(self, engine: str, case: Case) -> float:
        """Decodes all texts of a case and returns the seconds.

        Args:
          engine: one of `engines`.
          case: one of the cases.
        """
        seconds, tokens = self._process.ask(engine, self._cases.index(case)).split("\t")
        assert int(tokens) == case.tokens, f"{engine}: {tokens} tokens instead of {case.tokens}"
        return float(seconds)
