"""Makes and runs models of transformers, in a process without lingvo_gshard and TensorFlow.

    python peer_process.py setup.json

`peers.py` starts this program with any Python that has torch and transformers. setup.json has the
cases, each with the directory for its model, and the sizes of a batch. The program answers each
line of standard input:

    make CASE          writes the model of the case, and its logits, gradients and greedy tokens
    load CASE DIR      loads the model in DIR without remote code; answers the largest difference
                       of its logits from the case's logits
    loss CASE DIR IDS  loads the model in DIR; answers the cross-entropy per token of the rows in
                       the file IDS
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
    config = case["config"]
    vocabulary = config.get("decoder_vocab_size", config["vocab_size"])
    return draw.integers(3, vocabulary, (setup["rows"], setup["length"]))


def make_model(case):
    """Returns a model with random weights that make its outputs depend on all of them."""
    import torch
    import transformers

    torch.manual_seed(case["number"])
    config = transformers.AutoConfig.for_model(case["model_type"], **case["config"])
    model = _auto(case).from_config(config, attn_implementation="eager")
    if case["config"].get("tie_word_embeddings") is False:
        _untie(model)
    if case["model_type"] == "nllb-moe":
        run_all_experts()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                weight.normal_(0, 0.1)
                continue
            if not weight.requires_grad:
                # Sinusoids.
                continue
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
            else:
                weight.normal_(0 if is_zero_centered(name, case) else 1, 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "final_logits_bias")):
                buffer.normal_(0, 0.1)
            if buffer_name.endswith("tid2eid"):
                draw_experts(buffer, case["config"]["n_routed_experts"])
            if buffer_name.endswith("layer_scalar"):
                buffer.normal_(1, 0.1)
    return model.eval()


def draw_experts(table, experts, generator=None):
    """Gives each id of a table different experts."""
    import torch

    drawn = torch.rand(len(table), experts, generator=generator)
    table.copy_(drawn.argsort(1)[:, : table.shape[1]])


def run_all_experts():
    """Corrects NLLB-MoE in transformers 5.23.

    There each expert's choice, 0 or 1, is taken for the number of an expert, so that only the first
    two experts compute. Here each expert computes the tokens that the router gives it.
    """
    from transformers.models.nllb_moe import modeling_nllb_moe

    def forward(self, hidden_states, router_mask, router_probs):
        del router_mask
        outputs = [self[f"expert_{index}"](hidden_states) for index in range(self.num_experts)]
        kept = 1 - self.moe_token_dropout
        return sum(
            output * router_probs[:, index, None] * kept for index, output in enumerate(outputs)
        )

    modeling_nllb_moe.NllbMoeExperts.forward = forward


def _untie(model):
    """Gives a model a softmax of its own, which transformers ties in some models regardless."""
    import torch

    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.all_tied_weights_keys.pop("lm_head.weight", None)


def is_zero_centered(name, case):
    """Returns whether a vector is a bias, a norm's scale minus 1, or the logarithm of a rate."""
    if any(part in name for part in ("bias", "sinks", "A_log")):
        return True
    kind = case["model_type"]
    if kind.startswith(("qwen3_next", "qwen3_5")):
        return "linear_attn" not in name
    return kind.startswith(("gemma", "vaultgemma")) and kind != "gemma4_text"


def _auto(case):
    import transformers

    if case["start"]:
        return transformers.AutoModelForSeq2SeqLM
    return language_model()


def language_model():
    """Returns the class that makes language models, with those that transformers does not list."""
    import transformers
    from transformers.models.mistral4 import Mistral4ForCausalLM

    auto = transformers.AutoModelForCausalLM
    auto.register(transformers.Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    return auto


def write_tokenizer(case, directory):
    """Writes a tokenizer with as many ids as the model has."""
    import tokenizers

    words = {f"w{index}": index for index in range(case["config"]["vocab_size"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(os.path.join(directory, "tokenizer.json"))


def sources(setup, case):
    """Returns int64 sources [rows,length] of a case, and their mask. The last one is shorter."""
    draw = np.random.default_rng(1000 + case["number"])
    shape = setup["rows"], setup["length"]
    ids, mask = draw.integers(3, case["config"]["vocab_size"] - 1, shape), np.ones(shape, int)
    mask[-1, setup["length"] // 2 :] = 0
    return np.where(mask, ids, case["config"]["pad_token_id"]), mask


def inputs(setup, case, ids):
    """Returns the arguments of a model for texts."""
    import torch

    if not case["start"]:
        return {"input_ids": ids}
    source, mask = map(torch.tensor, sources(setup, case))
    return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": ids}


def generate(setup, case, model, ids):
    """Returns the tokens that greedy decoding adds to the beginning of each text.

    Each text is decoded alone, without padding. A translation starts with the ids in
    `case["start"]` instead of a text's own beginning.
    """
    import torch

    # No token ends a text.
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": setup["new_tokens"]}
    start = case["start"]
    with torch.inference_mode():
        if not start:
            found = []
            for row, size in zip(ids, setup["prompts"], strict=True):
                begun = row[None, :size]
                mask = torch.ones_like(begun)
                found.append(model.generate(begun, attention_mask=mask, **options)[0, size:])
            return torch.stack(found)
        source, mask = map(torch.tensor, sources(setup, case))
        before = torch.tensor([start] * len(ids))
        found = model.generate(source, attention_mask=mask, decoder_input_ids=before, **options)
        return found[:, len(start) :]


def make(setup, case):
    """Writes a model and what it computes."""
    import torch

    model, directory = make_model(case), case["directory"]
    model.save_pretrained(directory)
    write_tokenizer(case, directory)
    ids = torch.tensor(batch_ids(setup, case))
    # Not by `labels`: the last token would count in the length of the text. And first: a model with
    # dynamic RoPE keeps the rotations of the longest text that it has seen.
    predicted = model(**inputs(setup, case, ids[:, :-1])).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(predicted, ids[:, 1:].flatten()).backward()
    with torch.inference_mode():
        logits = model(**inputs(setup, case, ids)).logits
    tokens = generate(setup, case, model, ids)
    _write_gradients(model, os.path.join(directory, GRADIENTS))
    with torch.inference_mode():
        narrow = model.to(torch.bfloat16)(**inputs(setup, case, ids)).logits.float()
    texts = (
        dict(zip(("sources", "mask"), sources(setup, case), strict=True)) if case["start"] else {}
    )
    np.savez(
        os.path.join(directory, OUTPUTS),
        ids=ids.numpy(),
        logits=logits.numpy(),
        tokens=tokens.numpy(),
        bfloat16=narrow.numpy(),
        **dict(texts),
    )
    return "made"


def _write_gradients(model, directory):
    """Writes gradients as the weights of a model, so that they have the published names.

    Those of tensors that are not trained are NaNs.
    """

    gradients = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in model.state_dict().items():
        gradient = parameters[name].grad if name in parameters else None
        gradients[name] = _missing(value, parameters.get(name)) if gradient is None else gradient
    model.save_pretrained(directory, state_dict=gradients)


def _missing(value, parameter):
    """Returns the gradient of a tensor that has none: zeros, or NaNs if it is no parameter.

    Tensors of whole numbers have zeros, too.
    """
    import torch

    is_trained = parameter is not None and parameter.requires_grad
    is_trained = is_trained or not value.is_floating_point()
    return torch.zeros_like(value) if is_trained else torch.full_like(value, float("nan"))


def _logits(setup, case, directory, ids):
    """Returns the logits of a model that is loaded without remote code."""
    import torch

    model = _auto(case).from_pretrained(
        directory, attn_implementation="eager", trust_remote_code=False, dtype=torch.float32
    )
    with torch.inference_mode():
        return model.eval()(**inputs(setup, case, torch.tensor(ids))).logits


def loss(setup, case, directory, file):
    """Returns the mean cross-entropy of all tokens after the first of each row, as text."""
    import torch

    ids = np.load(file)
    logits = _logits(setup, case, directory, ids[:, :-1])
    labels = torch.tensor(ids[:, 1:])
    return str(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())


def load(setup, case, directory):
    """Returns the largest difference of a loaded model's logits from the case's logits, as text."""
    logits = _logits(setup, case, directory, batch_ids(setup, case))
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
