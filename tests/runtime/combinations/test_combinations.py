# tests: runtime/spmd.py, training/step/trainer.py, wings/repeat/loop.py
# tests: wings/pipeline/pipeline.py
"""Random combinations of options equal one device, or are refused with a reason, on a mesh.

Each runs in another process, since a check of XLA that fails ends the process. To run others:

    python -m tests.runtime.combinations.worker --seeds=0:50
"""

import dataclasses
import json
import subprocess
import sys

import pytest

from tests.runtime.combinations.combination import Combination

# Combinations in which a fault was found, each with what was wrong.
FOUND = {
    "a loop saved shards of a region as if they were full tensors": Combination(
        mesh="data=2", dispatch="dropless", stack="loop", rematerialize="products"
    ),
    "as before, by a minimum cut, with parts of rows": Combination(
        mesh="data=2,model=2",
        strategy="expert_sequence_tensor",
        dispatch="dropless",
        stack="loop",
        micro_batches=2,
        evaluates=True,
    ),
    "a repeated region was not allowed to read what the region had saved": Combination(
        mesh="data=2", dispatch="dropless", rematerialize="products", layers=1
    ),
    "rounding chose the expert of a token that is alone in its group": Combination(
        mesh="data=2,model=2",
        strategy="expert_sequence_tensor",
        router="sinkhorn",
        dispatch="dropless",
        group_size=4,
    ),
}
# Regions are traced backward outside of their context, where annotations have an effect.
IN_A_REGION = Combination(mesh="data=2,model=2", strategy="expert_tensor", dispatch="dropless")
# The number of seeds that `make test-all` runs.
ALL = 200
# Combinations of one process, which imports for as long as it compiles one of them.
PART = 5


def check(combinations: list[Combination]) -> None:
    """Checks that each combination equals one device or is refused."""
    texts = [json.dumps(dataclasses.asdict(each)) for each in combinations]
    command = [sys.executable, "-m", "tests.runtime.combinations.worker", *texts]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    verdicts = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    for combination, found in zip(combinations, verdicts, strict=False):
        assert found["verdict"] in ("equal", "refused"), f"{combination}: {found['reason']}"
    if len(verdicts) < len(combinations):
        pytest.fail(f"{combinations[len(verdicts)]} ended the process: {ended.stderr[-2000:]}")


def test_dropless_experts_that_are_split_by_hidden_units():
    check([IN_A_REGION])


@pytest.mark.slow
def test_all_combinations_that_once_failed():
    check(list(FOUND.values()))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL, PART))
def test_random_combinations(first):
    check([Combination.draw(seed) for seed in range(first, first + PART)])
