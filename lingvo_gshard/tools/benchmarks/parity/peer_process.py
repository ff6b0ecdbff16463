"""Makes and runs models of transformers, in a process without lingvo_gshard and TensorFlow.

    python peer_process.py setup.json

`peers.py` starts it with any Python that has torch and transformers. setup.json has the cases, each
with the directory for its model, and the sizes of a batch. It answers each line of standard input:

    make CASE          writes the model, its logits, its gradients and its greedy tokens
    load CASE DIR      loads a model without remote code; answers the largest difference of logits
    loss CASE DIR IDS  loads it; answers the cross-entropy per token of the rows in the file IDS
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

GRADIENTS, OUTPUTS = "gradients", "outputs.npz"


def batch_ids(setup, case):
    """Returns int64 ids [rows,length] of a case."""
    draw = np.random.default_rng(case["number"])
    vocabulary = case["config"]["vocab_size"]
    return draw.integers(3, vocabulary, (setup["rows"], setup["length"]))


def make_model(case):
    """Returns a model with random weights that make its outputs depend on all of them."""
    import torch
    import transformers

    torch.manual_seed(case["number"])
    config = transformers.AutoConfig.for_model(case["model_type"], **case["config"])
    model = _auto(case).from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
            else:
                weight.normal_(0 if is_zero_centered(name, case) else 1, 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model.eval()


def is_zero_centered(name, case):
    """Returns whether a vector is a bias, or a norm's scale minus 1."""
    return "bias" in name or "sinks" in name or case["model_type"].startswith("gemma")


def _auto(case):
    import transformers

    del case
    return transformers.AutoModelForCausalLM


def write_tokenizer(case, directory):
    """Writes a tokenizer with as many ids as the model has."""
    import tokenizers

    words = {f"w{index}": index for index in range(case["config"]["vocab_size"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(os.path.join(directory, "tokenizer.json"))


def make(setup, case):
    """Writes a model and what it computes."""
    import torch

    model, directory = make_model(case), case["directory"]
    model.save_pretrained(directory)
    write_tokenizer(case, directory)
    ids = torch.tensor(batch_ids(setup, case))
    # Not by `labels`: the last token would count in the length of the text. And first: a model with
    # dynamic RoPE keeps the rotations of the longest text that it has seen.
    predicted = model(input_ids=ids[:, :-1]).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(predicted, ids[:, 1:].flatten()).backward()
    with torch.inference_mode():
        logits = model(input_ids=ids).logits
    half = setup["length"] // 2
    # No token ends a text.
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        tokens = model.generate(
            ids[:, :half],
            attention_mask=torch.ones_like(ids[:, :half]),
            do_sample=False,
            max_new_tokens=setup["new_tokens"],
        )
    _write_gradients(model, os.path.join(directory, GRADIENTS))
    with torch.inference_mode():
        narrow = model.to(torch.bfloat16)(input_ids=ids).logits.float()
    np.savez(
        os.path.join(directory, OUTPUTS),
        ids=ids.numpy(),
        logits=logits.numpy(),
        tokens=tokens[:, half:].numpy(),
        bfloat16=narrow.numpy(),
    )
    return "made"


def _write_gradients(model, directory):
    """Writes gradients as the weights of a model, so that they have the published names."""
    import torch

    gradients = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in model.state_dict().items():
        gradient = parameters[name].grad if name in parameters else None
        gradients[name] = torch.zeros_like(value) if gradient is None else gradient
    model.save_pretrained(directory, state_dict=gradients)


def _logits(case, directory, ids):
    """Returns the logits of a model that is loaded without remote code."""
    import torch

    model = _auto(case).from_pretrained(
        directory, attn_implementation="eager", trust_remote_code=False, dtype=torch.float32
    )
    with torch.inference_mode():
        return model.eval()(input_ids=torch.tensor(ids)).logits


def loss(setup, case, directory, file):
    """Returns the mean cross-entropy of all tokens after the first of each row, as text."""
    import torch

    del setup
    ids = np.load(file)
    logits = _logits(case, directory, ids[:, :-1])
    labels = torch.tensor(ids[:, 1:])
    return str(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())


def load(setup, case, directory):
    """Returns the largest difference of the logits of a loaded model, as text."""
    logits = _logits(case, directory, batch_ids(setup, case))
    expected = np.load(os.path.join(case["directory"], OUTPUTS))["logits"]
    return str(np.abs(logits.numpy() - expected).max())


def main():
    """Reads the setup, then answers requests until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    with open(sys.argv[1], encoding="utf-8") as file:
        setup = json.load(file)
    for line in sys.stdin:
        request, number, *rest = line.rstrip("\n").split("\t")
        case = setup["cases"][int(number)]
        answer = {"make": make, "load": load, "loss": loss}[request](setup, case, *rest)
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
