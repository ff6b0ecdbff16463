"""Trains with other libraries, each in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import sentencepiece

from benchmarks.peer_python import PeerProcess
from benchmarks.train import peer_process
from benchmarks.train.measure import Training, score, training_flops
from benchmarks.train.settings import VOCABULARY_SIZE, Setting
from lingvo_gshard.data import Row

_SPLITS = ("train", "dev", "test")


class Peers:
    """The text for other libraries, in files, with a vocabulary."""

    def __init__(
        self,
        folder: pathlib.Path,
        rows: dict[str, Sequence[Row]],
        vocabulary_size: int = VOCABULARY_SIZE,
    ):
        """Writes the text, and trains the vocabulary.

        Args:
          folder: an empty folder for all files.
          rows: the rows of the splits train, dev and test.
          vocabulary_size: number of pieces.
        """
        self._folder, self._test = folder, rows["test"]
        for split in _SPLITS:
            _write_lines(folder / f"{split}.src", [row.source for row in rows[split]])
            _write_lines(folder / f"{split}.trg", [row.target for row in rows[split]])
        pieces = _train_vocabulary(folder, vocabulary_size)
        sides = [[row.source for row in rows["train"]], [row.target for row in rows["train"]]]
        # The libraries add the end of each text.
        lengths = [[len(ids) + 1 for ids in pieces.encode(side)] for side in sides]
        self._lengths = np.array(lengths).T

    def train(
        self, python: str, setting: Setting, minutes: float, seed: int, threads: int
    ) -> Training:
        """Trains and translates with a library, and returns the training with its scores.

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
        setup = {
            **dataclasses.asdict(setting),
            "text": str(self._folder),
            "folder": str(own),
            "seconds": 60 * minutes,
            "seed": seed,
            "threads": threads,
        }
        file = own / "setup.json"
        file.write_text(json.dumps(setup), encoding="utf-8")
        program = peer_process.__file__
        with PeerProcess(setting.library, python, program, file, threads) as process:
            return self._training(setting, json.loads(process.answer()))

    def _training(self, setting: Setting, answer: dict[str, Any]) -> Training:
        """Returns the training that a process describes."""
        tokens = answer["source_tokens"] + answer["target_tokens"]
        found = score(self._test, answer["translations"])
        return Training(
            parameters=answer["parameters"],
            steps=answer["steps"],
            seconds=answer["seconds"],
            tokens=tokens,
            flops=training_flops(setting.sizes, self._lengths) * tokens / int(self._lengths.sum()),
            chrf=found.chrf,
            bleu=found.bleu,
        )


def _write_lines(path: pathlib.Path, texts: Sequence[str]) -> None:
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")


def _train_vocabulary(folder: pathlib.Path, size: int) -> sentencepiece.SentencePieceProcessor:
    """Trains the vocabulary of both sides, as a model and as a list, and returns it."""
    sentencepiece.SentencePieceTrainer.train(
        input=[str(folder / "train.src"), str(folder / "train.trg")],
        model_prefix=str(folder / "vocabulary"),
        vocab_size=size,
        character_coverage=1.0,
        unk_id=peer_process.UNK,
        pad_id=peer_process.PAD,
        bos_id=peer_process.BOS,
        eos_id=peer_process.EOS,
        pad_piece="<pad>",
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "vocabulary.model"))
    names = [pieces.id_to_piece(index) for index in range(pieces.get_piece_size())]
    _write_lines(folder / "vocabulary.txt", names)
    return pieces
