"""Searches of transformers for tests: lists of ids that end a text, limits, forbidden tokens.

    python -m tests.open_models.recorded.searches

writes searches.json. It needs the extra `peers`: PyTorch and transformers.
"""

from __future__ import annotations

import json
import pathlib
import random
import tempfile

import safetensors.numpy

from tests.open_models import published

FILE = pathlib.Path(__file__).with_suffix(".json")
ENDS = ([2], [2, 3], [3, 7, 9], [6, 19])
BEAMS = (1, 1, 2, 4)
_CASES_OF_A_MODEL = 24


def write_model(directory: pathlib.Path, seed: int) -> None:
    """Writes a Llama with random weights into a new directory."""
    published.write(directory)
    safetensors.numpy.save_file(published.tensors(seed), directory / "model.safetensors")


def draw_case(draw: random.Random) -> dict:
    """Returns a request. `least` counts tokens before the end, which may follow."""
    most = draw.randint(1, 10)
    return {
        "prompt": [1, *draw.choices(range(published.VOCABULARY), k=draw.randint(0, 8))],
        "ends": draw.choice(ENDS),
        "beam": draw.choice(BEAMS),
        "most": most,
        "least": draw.choice([0, 0, draw.randint(0, most - 1)]),
        "forbidden": draw.choice([[], [], sorted(draw.sample(range(published.VOCABULARY), 5))]),
    }


def search(model, case: dict) -> list[dict]:
    """Returns the texts that transformers finds, the best first: tokens with the end, and scores.

    A score is the sum of the model's own log-probabilities.
    """
    import torch

    ids = torch.tensor([case["prompt"]])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=case["beam"],
        num_return_sequences=case["beam"],
        do_sample=False,
        length_penalty=0.0,
        eos_token_id=case["ends"],
        # Stands after the end in rows of several texts; no token is negative.
        pad_token_id=-1,
        max_new_tokens=case["most"],
        min_new_tokens=case["least"] or None,
        suppress_tokens=case["forbidden"] or None,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    rows = found.sequences[:, len(case["prompt"]) :].tolist()
    texts = [[token for token in row if token >= 0] for row in rows]
    if case["beam"] > 1:
        scores = found.sequences_scores.tolist()
    else:
        logs = [torch.log_softmax(logits[0], -1) for logits in found.logits]
        scores = [sum(float(log[token]) for log, token in zip(logs, texts[0], strict=True))]
    return [
        {"tokens": tokens, "score": round(score, 5)}
        for tokens, score in zip(texts, scores, strict=True)
        # transformers fills up with texts that do not exist.
        if score > -1e6
    ]


def main() -> None:
    """Writes the file."""
    import transformers

    models = []
    for seed in range(3):
        draw = random.Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            directory = pathlib.Path(folder) / "model"
            write_model(directory, seed)
            model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        cases = [draw_case(draw) for _ in range(_CASES_OF_A_MODEL)]
        models.append({"seed": seed, "cases": [c | {"found": search(model, c)} for c in cases]})
    record = {"transformers": transformers.__version__, "models": models}
    lines = json.dumps(record).replace('{"prompt"', '\n{"prompt"').replace('{"seed"', '\n{"seed"')
    FILE.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
