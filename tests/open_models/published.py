"""Small published models with random weights, made without this package's tables."""

import json
import pathlib
from collections.abc import Mapping

import numpy as np
import safetensors.numpy

HEADS, KEY_HEADS, SIZE, MODEL, HIDDEN, VOCABULARY, LAYERS = 4, 2, 4, 8, 12, 24, 2
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": MODEL,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "float32",
}


def tensors(
    seed: int = 0, dtype: str = "float32", sizes: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Returns the tensors of a Llama of CONFIG, as Hugging Face publishes them.

    Args:
      seed: seed of the values.
      dtype: their type.
      sizes: sizes that differ from those of CONFIG.
    """
    config = CONFIG | (sizes or {})
    model, hidden, size = (
        config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    heads = size * config["num_attention_heads"]
    key_heads = size * config["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], model),
        "lm_head.weight": (config["vocab_size"], model),
    }
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {
            f"{attention}.q_proj.weight": (heads, model),
            f"{attention}.k_proj.weight": (key_heads, model),
            f"{attention}.v_proj.weight": (key_heads, model),
            f"{attention}.o_proj.weight": (model, heads),
            f"{mlp}.gate_proj.weight": (hidden, model),
            f"{mlp}.up_proj.weight": (hidden, model),
            f"{mlp}.down_proj.weight": (model, hidden),
            f"model.layers.{layer}.input_layernorm.weight": (model,),
            f"model.layers.{layer}.post_attention_layernorm.weight": (model,),
        }
    shapes["model.norm.weight"] = (model,)
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) + (len(shape) == 1)).astype(dtype)
        for name, shape in shapes.items()
    }


def write_tokenizer(directory: pathlib.Path) -> None:
    """Writes a tokenizer of words that puts <s> before a text."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<end>": 3}
    words |= {f"w{index}": index for index in range(4, VOCABULARY)}
    special = [
        {"id": i, "content": word, "special": True, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False}
        for word, i in list(words.items())[:4]
    ]
    before = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [before, text],
            "pair": [before, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def write(
    directory: pathlib.Path,
    dtype: str = "float32",
    shards: int = 1,
    sizes: Mapping[str, int] | None = None,
    **config,
) -> dict:
    """Writes a model into a new directory and returns its tensors.

    Args:
      directory: where to.
      dtype: type of the tensors.
      shards: number of files; several have an index.
      sizes: sizes of tensors that differ from those of CONFIG.
      **config: values of config.json that differ from CONFIG.
    """
    directory.mkdir(parents=True)
    values = CONFIG | (sizes or {}) | config
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    write_tokenizer(directory)
    found = tensors(dtype=dtype, sizes=sizes)
    names = sorted(found)
    if shards == 1:
        safetensors.numpy.save_file(found, directory / "model.safetensors")
        return found
    where = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        safetensors.numpy.save_file({name: found[name] for name in part}, directory / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return found
