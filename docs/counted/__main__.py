"""Counts the weights of published models, and writes docs/counted/table.md.

    python -m docs.counted --peers_python=PYTHON

reads the configs of docs/counted/configs.jsonl as an import does, counts the weights that each asks
for, and has PYTHON, which has PyTorch and transformers, count them, too. Nothing is downloaded, and
no weight is made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from lingvo_gshard.wings.open_models.config import CONFIG_FILE, PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.importing import weight_specs

FOLDER = pathlib.Path(__file__).parent
CONFIGS = FOLDER / "configs.jsonl"
TABLE = FOLDER / "table.md"
COLUMNS = ("model", "architecture", "config from", "weights", "transformers")


def entries() -> Iterator[dict[str, Any]]:
    """Yields the name, the source and the config of each model."""
    for line in CONFIGS.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def weights_of(values: dict[str, Any]) -> int:
    """Returns the number of weights that a config asks for; UserError if it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, CONFIG_FILE)
        pathlib.Path(path).write_text(json.dumps(values), encoding="utf-8")
        specs = weight_specs(experiment_of(PublishedConfig.load(path)))
    return sum(math.prod(spec.shape) for spec in specs.flatten())


def row(entry: dict[str, Any], weights: int, theirs: str) -> str:
    """Returns a row of the table.

    Args:
      entry: the model.
      weights: the number of its weights.
      theirs: what transformers counts.
    """
    cells = entry["name"], f"`{entry['config']['model_type']}`", entry["source"], f"{weights:,}"
    return f"| {' | '.join((*cells, theirs))} |"


def main() -> None:
    """Counts and writes the table."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.counted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peers_python", default=sys.executable, help="has PyTorch, transformers")
    given = parser.parse_args()
    command = [given.peers_python, str(FOLDER / "peer.py")]
    answers = subprocess.run(
        command, input=CONFIGS.read_bytes(), stdout=subprocess.PIPE, check=True
    ).stdout.splitlines()
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|---|---|---|"]
    for entry, answer in zip(entries(), map(json.loads, answers), strict=True):
        weights = weights_of(entry["config"])
        theirs = answer.get("weights")
        if theirs is None:
            print(f"{entry['name']}: {answer['error']}", file=sys.stderr)
        text = "equal" if theirs == weights else "-" if theirs is None else f"{theirs:,}"
        lines.append(row(entry, weights, text))
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
