"""Counts the weights of models by transformers; run by a Python that has PyTorch and transformers.

    python docs/counted/peer.py < configs.jsonl

prints a line of JSON for each config: the number of weights, or why there is none.
"""

from __future__ import annotations

import json
import sys
from typing import Any

# Parts of models that are not their language model.
_OTHER_PARTS = ("visual", "vision", "projector", "audio", "image_newline")


def count(values: dict[str, Any]) -> int:
    """Returns the number of weights of the language model of a config; tied ones count once."""
    import torch
    import transformers

    given = {name: value for name, value in values.items() if name not in _NOT_BUILT}
    kind = _ALIASES.get(values["model_type"], values["model_type"])
    config = transformers.CONFIG_MAPPING[kind].from_dict(given)
    text = getattr(config, "text_config", None)
    with torch.device("meta"):
        if config.is_encoder_decoder:
            model = transformers.AutoModelForSeq2SeqLM.from_config(config)
        elif text is None:
            model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            model = transformers.AutoModelForImageTextToText.from_config(config)
    model.tie_weights()
    kept = model.state_dict().keys()
    named = [*model.named_parameters(), *(b for b in model.named_buffers() if b[0] in kept)]
    return sum(x.numel() for name, x in named if not any(part in name for part in _OTHER_PARTS))


# Kimi K2's config names the class of DeepSeek-V3.
_ALIASES = {"kimi_k2": "deepseek_v3"}
# Weights are counted, not loaded: how they are packed does not matter.
_NOT_BUILT = ("quantization_config", "auto_map", "model_type")


def main() -> None:
    """Answers each line."""
    for line in sys.stdin:
        values = json.loads(line)["config"]
        try:
            answer: dict[str, Any] = {"weights": count(values)}
        except Exception as error:  # Any mistake of a config is an answer.
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
