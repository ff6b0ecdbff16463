"""Finds the keys of config.json that have an effect in each class of transformers.

    PYTHONPATH=. PYTHON -m docs.class_keys

writes lingvo_gshard/wings/open_models/families/class_keys.json. PYTHON has PyTorch and
transformers. With names of classes, such as `llama mixtral`, only their entries change. A key has
an effect if one of its values changes the names or shapes of the weights, the logits, or the loss
of a training step, in one of the small models of `benchmarks.parity.cases`. All keys are tried that
the class names in its source, has as an attribute, or asks a config for while a model is made and
run.
"""

from __future__ import annotations

import json
import logging
import pathlib
import sys
from typing import Any

from benchmarks.parity.cases import CASES
from docs.class_keys.effects import Models

FILE = pathlib.Path("lingvo_gshard/wings/open_models/families/class_keys.json")
# Keys that no small model shows. Of routers: texts must fill experts, and transformers leaves the
# routers' losses out where a translation has labels. InternLM3 takes both biases or none. Gemma 4
# shares keys and values only with an earlier layer of the same kind. Sizes of Granite 4's Mamba-2
# depend on each other, and the number of layers on their types.
UNSEEN = {
    "gemma4_text": {
        *("num_kv_shared_layers", "use_double_wide_mlp", "vocab_size_per_layer_input"),
    },
    "granitemoehybrid": {
        *("hidden_size", "mamba_d_head", "mamba_expand", "mamba_n_heads", "num_hidden_layers"),
        "router_aux_loss_coef",
    },
    "internlm3": {"attention_bias", "mlp_bias"},
    "nllb-moe": {
        "batch_prioritized_routing",
        "expert_capacity",
        "normalize_router_prob_before_dropping",
        "router_dtype",
        "router_ignore_padding_tokens",
        "router_z_loss_coef",
        "second_expert_policy",
    },
    "switch_transformers": {
        "router_aux_loss_coef",
        "router_dtype",
        "router_ignore_padding_tokens",
        "router_z_loss_coef",
    },
}
# Cases of a class that are tried.
_CASES = 2


def main() -> None:
    """Writes the file, and says which keys a class reads without effect."""
    import transformers

    logging.disable(logging.CRITICAL)
    wanted = sys.argv[1:]
    found: dict[str, dict[str, Any]] = {}
    if wanted:
        found = json.loads(FILE.read_text(encoding="utf-8"))["keys"]
    for name in sorted({case.model_type for case in CASES}):
        if wanted and name not in wanted:
            continue
        models = Models(name, [case for case in CASES if case.model_type == name][:_CASES])
        effects = models.effects() | UNSEEN.get(name, set())
        found[name] = models.defaults(effects)
        record = {"transformers": transformers.__version__, "keys": dict(sorted(found.items()))}
        # JSON has no infinity: a limit without a value is none.
        text = json.dumps(record, indent=1).replace("Infinity", "null")
        FILE.write_text(text + "\n", encoding="utf-8")
        rest = sorted(models.universe - effects)
        print(
            f"{name}: effect {sorted(effects)}\n   no effect: {rest}", file=sys.stderr, flush=True
        )


if __name__ == "__main__":
    main()
