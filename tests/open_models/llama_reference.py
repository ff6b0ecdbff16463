"""Llama in NumPy and float64, one position after the other, after the paper and its code."""

import numpy as np

from tests.open_models.published import CONFIG, HEADS, KEY_HEADS, LAYERS, SIZE


def logits(tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Returns the logits [L,V] of one text."""
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        own = {
            name.removeprefix(f"model.layers.{layer}."): value for name, value in weights.items()
        }
        x = x + _attention(own, _norm(x, own["input_layernorm.weight"]))
        h = _norm(x, own["post_attention_layernorm.weight"])
        gate = h @ own["mlp.gate_proj.weight"].T
        h = gate / (1 + np.exp(-gate)) * (h @ own["mlp.up_proj.weight"].T)
        x = x + h @ own["mlp.down_proj.weight"].T
    return _norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * scale


def _attention(own, x):
    query, key, value = (
        (x @ own[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, SIZE) for name in "qkv"
    )
    mixed = np.zeros((len(x), HEADS, SIZE))
    for head in range(HEADS):
        shared = head // (HEADS // KEY_HEADS)
        for at in range(len(x)):
            q = _rotate(query[at, head], at)
            scores = [q @ _rotate(key[i, shared], i) / np.sqrt(SIZE) for i in range(at + 1)]
            shares = np.exp(scores - np.max(scores))
            mixed[at, head] = shares @ value[: at + 1, shared] / shares.sum()
    return mixed.reshape(len(x), -1) @ own["self_attn.o_proj.weight"].T


def _rotate(x, position):
    half = SIZE // 2
    rotated = np.empty(SIZE)
    for i in range(half):
        angle = position * CONFIG["rope_theta"] ** (-2 * i / SIZE)
        cosine, sine = np.cos(angle), np.sin(angle)
        rotated[i] = x[i] * cosine - x[half + i] * sine
        rotated[half + i] = x[half + i] * cosine + x[i] * sine
    return rotated
