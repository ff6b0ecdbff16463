"""Computes models of transformers for `variants.py`, in a Python that has PyTorch and transformers.

    python -m docs.class_keys.peer

answers each line of standard input, a JSON object with "values", the values of a config.json, and
"directory", where the model and its logits go. An answer is "computed" or an error's name.
"""

from __future__ import annotations

import copy
import json
import logging
import pathlib
import sys

import numpy as np
import transformers

from docs.class_keys.effects import compute


def answer(values: dict, directory: str) -> str:
    """Writes a model and its logits."""
    folder = pathlib.Path(directory)
    try:
        config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values))
        found = compute(config, bool(config.is_encoder_decoder))
        found.model.save_pretrained(folder)
    except Exception as error:  # What transformers cannot compute is an answer.
        return type(error).__name__
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    np.savez(folder / "logits.npz", logits=found.logits.numpy(), ids=found.ids.numpy())
    return "computed"


def main() -> None:
    """Answers until standard input ends."""
    logging.disable(logging.CRITICAL)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(answer(**json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
