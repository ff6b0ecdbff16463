"""Distributions that samplers of transformers draw from, for tests.

    python -m tests.inference.decoding.peer_samplers

writes peer_samplers.json. It needs the extra `peers`: PyTorch and transformers.
"""

from __future__ import annotations

import json
import pathlib
import random
from typing import Any

FILE = pathlib.Path(__file__).with_suffix(".json")
SIZE, CASES = 12, 60


def draw_case(draw: random.Random) -> dict[str, Any]:
    """Returns logits and options."""
    options = {
        "temperature": draw.choice([1.0, 0.5, 0.7, 1.5, 2.0]),
        "top_k": draw.choice([0, 0, 1, 2, 3, 6, 50]),
        "top_p": draw.choice([1.0, 1.0, 0.3, 0.5, 0.8, 0.9, 0.95]),
        "min_p": draw.choice([0.0, 0.0, 0.05, 0.2, 0.5]),
    }
    return {"logits": [round(draw.gauss(0, 2), 4) for _ in range(SIZE)], **options}


def distribution(case: dict[str, Any]) -> list[float]:
    """Returns the probabilities of tokens as `generate` of transformers draws them."""
    import torch
    import transformers

    config = transformers.GenerationConfig(
        do_sample=True, **{name: value for name, value in case.items() if name != "logits"}
    )
    # The list of `generate` alone, without a model.
    warpers = transformers.GenerationMixin._get_logits_processor(
        _Model(), config, device="cpu", logits_processor=[]
    )
    scores = warpers(torch.tensor([[0]]), torch.tensor([case["logits"]]))
    return [round(value, 7) for value in torch.softmax(scores[0].double(), -1).tolist()]


class _Model:
    """What transformers asks a model for while it lists its processors."""

    config = None
    generation_config = None

    def _merge_criteria_processor_list(self, default: Any, custom: Any) -> Any:
        del custom
        return default


def main() -> None:
    """Writes the file."""
    import transformers

    draw = random.Random(1)
    cases = [draw_case(draw) for _ in range(CASES)]
    # Of half of a distribution after two tokens are left, one token.
    cases.append({"logits": [0.0, 0.6931, 1.0986, 1.3863], "top_k": 2, "top_p": 0.5})
    cases[-1] |= {"temperature": 1.0, "min_p": 0.0}
    record = {
        "transformers": transformers.__version__,
        "cases": [case | {"probabilities": distribution(case)} for case in cases],
    }
    FILE.write_text(json.dumps(record).replace('{"logits"', '\n{"logits"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
