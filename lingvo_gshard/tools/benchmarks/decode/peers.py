"""Runs other engines in a process of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from lingvo_gshard.tools.benchmarks.decode import peer_process
from lingvo_gshard.tools.benchmarks.decode.cases import Case
from lingvo_gshard.tools.benchmarks.decode.sizes import DenseSizes

ENGINES = (peer_process.HUGGING_FACE, *peer_process.CTRANSLATE2)
LIBRARIES = ("torch", "transformers", "ctranslate2")


def has_libraries(python: str, libraries: Sequence[str] = LIBRARIES) -> bool:
    """Returns whether a Python has these libraries of the extra `peers`."""
    modules = ", ".join(map(repr, libraries))
    program = f"import importlib.util as u; assert all(map(u.find_spec, ({modules},)))"
    try:
        return not subprocess.run([python, "-c", program], capture_output=True).returncode
    except OSError:
        return False


class Peers:
    """A process that decodes with other engines. A context manager."""

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

    def __enter__(self) -> Peers:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()
        self._directory.cleanup()

    def decode(self, engine: str, case: Case) -> float:
        """Decodes all texts of a case and returns the seconds.

        Args:
          engine: one of ENGINES.
          case: one of the cases.
        """
        assert self._process.stdin
        self._process.stdin.write(f"{engine}\t{self._cases.index(case)}\n")
        self._process.stdin.flush()
        seconds, tokens = self._answer().split("\t")
        assert int(tokens) == case.tokens, f"{engine}: {tokens} tokens instead of {case.tokens}"
        return float(seconds)

    def _answer(self) -> str:
        """Returns the next line of the process."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["it printed nothing"]
            raise ValueError(f"--peers_python: the process of the peers ended: {last[0]}")
        return line


def environment(threads: int) -> dict[str, str]:
    """Returns the environment of the process: offline, with this many threads."""
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    return {**os.environ, **own}
