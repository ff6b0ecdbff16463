"""Compares configs with random changes of their keys with transformers.

    python -m docs.class_keys.variants --peers_python=PYTHON --count=300

draws models of `benchmarks.parity.cases`, all or those of `--families`, and changes one to three
keys of each: keys of the class, keys of other classes, and rotary keys. PYTHON, which has PyTorch
and transformers, computes the logits of each on random weights. Either they are equal here, or the
config is refused, and then transformers computes something else without the keys that the error
names. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from benchmarks.parity.cases import CASES
from lingvo_gshard.core import UserError, context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.families import FAMILIES
from lingvo_gshard.wings.open_models.importing import PublishedModel, weight_specs

_LARGEST = 2e-3
# transformers computes only two of its experts.
_WITHOUT_PEER = "nllb-moe"
# Keys of files that no class reads, and values that many keys may have.
_OTHERS = ("im_start_id", "pad_id", "pool_type", "full_attn_mod", "lm_head_bias", "use_cla")
_VALUES = (True, False, None, 0, 1, 2, 3, 0.5, "swish", "gelu", [], [1, 0, 1])
_ROTARY = (
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    {"rope_theta": 500.0},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1000.0},
)


class Peer:
    """Computes models in a process with transformers."""

    def __init__(self, python: str):
        """Starts the process."""
        command = [python, "-W", "ignore", "-m", "docs.class_keys.peer"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, stderr=subprocess.DEVNULL, **pipes)

    def compute(self, values: dict[str, Any], folder: pathlib.Path) -> np.ndarray | None:
        """Returns the logits of a config; None if transformers cannot compute it."""
        assert self._process.stdin and self._process.stdout
        folder.mkdir(exist_ok=True)
        request = {"values": values, "directory": str(folder)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if self._process.stdout.readline().strip() != "computed":
            return None
        return np.load(folder / "logits.npz")["logits"]


def draw(
    random_: random.Random, families: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of a config, and the changes of one."""
    case = random_.choice([case for case in CASES if case.model_type in families])
    values = {"model_type": case.model_type, **case.values}
    own = FAMILIES[case.model_type].class_keys
    strange = {key for family in FAMILIES.values() for key in family.class_keys} - own.keys()
    changes: dict[str, Any] = {}
    for _ in range(random_.randint(1, 3)):
        kind = random_.random()
        if kind < 0.2:
            changes |= random_.choice(_ROTARY)
        elif kind < 0.6:
            key = random_.choice(sorted(own))
            usual = values.get(key, own[key])
            is_number = isinstance(usual, (int, float)) and not isinstance(usual, bool)
            near = (2 * usual, usual / 2, usual) if is_number else (usual, not usual)
            changes[key] = random_.choice((*near, random_.choice(_VALUES)))
        else:
            changes[random_.choice((*sorted(strange), *_OTHERS))] = random_.choice(_VALUES)
    return values, changes


def ours(folder: pathlib.Path) -> np.ndarray:
    """Returns the logits of the model in a directory; UserError if it is refused."""
    params = experiment_of(PublishedConfig.load(folder))
    model, task = PublishedModel.open(folder, params), params.task.instantiate()
    weights = []
    specs = weight_specs(params)
    for path, spec in specs.flatten_items():
        weight = np.zeros(spec.shape, np.float32)
        for part in model.parts(path):
            weight[part.index] = part.read()
        weights.append(tf.constant(weight))
    ids = np.load(folder / "logits.npz")["ids"].astype(np.int32)
    positions = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    targets = ids[:, ::-1] if "source_vocabulary_size" in params.task else ids
    batch = {"target_inputs": targets, "source_ids": ids}
    batch |= {f"{side}_segments": np.ones_like(ids) for side in ("target", "source")}
    batch |= {f"{side}_positions": positions for side in ("target", "source")}
    batch["target_labels"] = targets
    theta = specs.pack(weights)
    with context.scope(training=False):
        return task.logits(theta, {k: tf.constant(v) for k, v in batch.items()}).numpy()


def judge(peer: Peer, values: dict, changes: dict, folder: pathlib.Path) -> str:
    """Returns what became of a variant; it begins with "FAULT" if it is a fault."""
    theirs = peer.compute(values | changes, folder)
    if theirs is None:
        return "transformers cannot compute it"
    try:
        found = ours(folder)
    except UserError as error:
        keys = _named(str(error), changes)
        without = {key: value for key, value in changes.items() if key not in keys}
        plain = peer.compute(values | without, folder)
        if keys and (plain is None or not _are_equal(plain, theirs)):
            return "refused"
        return f"FAULT, refused without need: {error}"
    if _are_equal(found, theirs):
        return "equal"
    return f"FAULT, differs by {np.abs(found - theirs).max()}"


def _named(message: str, changes: dict[str, Any]) -> list[str]:
    return [key for key in changes if re.search(rf"\b{key}\b", message)]


def _are_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, b, atol=_LARGEST, rtol=1e-3, equal_nan=True))


def variants(
    count: int, seed: int, families: Collection[str]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields configs of some families and their changes."""
    for number in range(count):
        yield draw(random.Random(seed + number), families)


def main() -> None:
    """Compares, and prints each fault and the number of each outcome."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers_python", required=True)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    known = {case.model_type for case in CASES} - {_WITHOUT_PEER}
    parser.add_argument("--families", nargs="+", choices=sorted(known), default=sorted(known))
    given = parser.parse_args()
    peer, outcomes = Peer(given.peers_python), collections.Counter()
    for values, changes in variants(given.count, given.seed, given.families):
        with tempfile.TemporaryDirectory() as folder:
            found = judge(peer, values, changes, pathlib.Path(folder))
        outcomes[found.partition(",")[0]] += 1
        if found.startswith("FAULT"):
            print(f"{found}\n    {values['model_type']}: {changes}", flush=True)
    print(dict(outcomes))
    sys.exit(1 if outcomes["FAULT"] else 0)


if __name__ == "__main__":
    main()
