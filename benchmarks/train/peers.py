"""Trains with other libraries, each in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import sentencepiece

from benchmarks.peer_python import PeerProcess
from benchmarks.train import peer_process
from benchmarks.train.measure import Training, gflops, score
from benchmarks.train.settings import VOCABULARY_SIZE, WARMUP_STEPS, Setting
from lingvo_gshard.data import Row


class Peers:
    """The text for other libraries, in files, with a vocabulary."""

    def __init__(
        self,
        folder: pathlib.Path,
        rows: Mapping[str, Sequence[Row]],
        vocabulary_size: int = VOCABULARY_SIZE,
    ):
        """Writes the text, and trains the vocabulary.

        Args:
          folder: an empty folder for all files.
          rows: the rows of the splits train, dev and test.
          vocabulary_size: number of pieces.
        """
        self._folder, self._test = folder, rows["test"]
        for split, chosen in rows.items():
            for side, name in (("src", "source"), ("trg", "target")):
                text = "".join(f"{getattr(row, name)}\n" for row in chosen)
                (folder / f"{split}.{side}").write_text(text, encoding="utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=[str(folder / "train.src"), str(folder / "train.trg")],
            model_prefix=str(folder / "vocabulary"),
            vocab_size=vocabulary_size,
            character_coverage=1.0,
            pad_id=peer_process.PAD,
            bos_id=peer_process.BOS,
            eos_id=peer_process.EOS,
            vocabulary_output_piece_score=False,
            minloglevel=2,
        )
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "vocabulary.model"))
        sides = [[row.source for row in rows["train"]], [row.target for row in rows["train"]]]
        # The libraries add the end of each text.
        self._lengths = np.array(
            [[len(ids) + 1 for ids in pieces.encode(side)] for side in sides]
        ).T

    def train(
        self, python: str, setting: Setting, minutes: float, seed: int, threads: int
    ) -> Training:
        """Trains and translates with a library.

        Args:
          python: the path of a Python that has the library.
          setting: what to train.
          minutes: time of the steps.
          seed: seed of the weights, the batches and dropout.
          threads: threads of the library.

        Raises:
          UserError: the process failed.
        """
        own = self._folder / f"{setting.library}-{setting.name}-{seed}"
        own.mkdir()
        more = {"text": str(self._folder), "folder": str(own), "seconds": 60 * minutes}
        more |= {"warmup_steps": WARMUP_STEPS, "seed": seed, "threads": threads}
        file, program = own / "setup.json", peer_process.__file__
        file.write_text(json.dumps(dataclasses.asdict(setting) | more), encoding="utf-8")
        with PeerProcess(setting.library, python, program, file, threads) as process:
            answer = json.loads(process.answer())
        found = score(self._test, answer["translations"])
        rate = answer["tokens"] / answer["seconds"]
        return Training(
            library=setting.library,
            setting=setting.name,
            run=f"seed {seed}",
            parameters=answer["parameters"],
            steps=answer["steps"],
            seconds=answer["seconds"],
            tokens_per_second=rate,
            gflops=gflops(setting.sizes, self._lengths, rate),
            chrf=found.chrf,
            bleu=found.bleu,
        )
