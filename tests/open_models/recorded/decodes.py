"""Greedy decoding of transformers for tests: a small model of each kind of attention.

    python -m tests.open_models.recorded.decodes PEERS_PYTHON

writes decodes.json. PEERS_PYTHON is a Python that has PyTorch and transformers.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from benchmarks.parity.case import NEW_TOKENS, PROMPTS
from benchmarks.parity.peer_process import write_tokenizer
from tests.open_models.translation import models

FILE = pathlib.Path(__file__).with_suffix(".json")
CASES = (
    "ministral, windows in some layers",
    "mistral4, latent attention, queries that grow, groups of softmax scores",
    "glm_moe_dsa, fewer tokens than a text has, the indexer's pairs are neighbors",
    "afmoe, gated attention, rotations in windows only, norms on both sides, shared experts",
    "granitemoehybrid, Mamba-2 and an attention without positions, a shared expert",
    "nemotron_h, layers with one sublayer each: Mamba-2, experts, an attention",
    "kimi_linear, Kimi delta attention and latent attention without positions, experts",
)
# The others take longer to compile.
QUICK = (CASES[0], CASES[3])
_PEER = """
import json, sys, torch, transformers
from benchmarks.parity.peer_process import language_model
model = language_model().from_pretrained(sys.argv[1], attn_implementation="eager").eval()
model.generation_config.eos_token_id = None
tokens = []
for prompt in json.loads(sys.argv[2]):
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    found = model.generate(ids, max_new_tokens=int(sys.argv[3]), **given)
    tokens.append(found[0, len(prompt):].tolist())
print(json.dumps({"transformers": transformers.__version__, "tokens": tokens}))
"""


def write_model(directory: pathlib.Path, name: str) -> None:
    """Writes the model of a case into a new directory."""
    models.write(directory, name)
    write_tokenizer({"config": models.case_of(name).values}, directory)


def main() -> None:
    """Writes the file."""
    cases, version = [], ""
    for number, name in enumerate(CASES):
        draw = np.random.default_rng(number)
        size = models.case_of(name).values["vocab_size"]
        prompts = [draw.integers(3, size, length).tolist() for length in PROMPTS]
        with tempfile.TemporaryDirectory() as folder:
            directory = pathlib.Path(folder) / "model"
            write_model(directory, name)
            arguments = (str(directory), json.dumps(prompts), str(NEW_TOKENS))
            command = [sys.argv[1], "-W", "ignore", "-c", _PEER, *arguments]
            answer = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        found = json.loads(answer.splitlines()[-1])
        version = found["transformers"]
        cases.append({"case": name, "prompts": prompts, "tokens": found["tokens"]})
    text = json.dumps({"transformers": version, "cases": cases})
    for start in ('{"case"', '"prompts"', '"tokens"'):
        text = text.replace(start, f"\n{start}")
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
