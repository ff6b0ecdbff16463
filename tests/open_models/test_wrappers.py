"""Tests the text part of models that also see images: it is a language model with other names.

The slow test compares logits with those of the whole model in transformers.
"""

import json
import os
import subprocess

import numpy as np
import pytest
import safetensors.numpy

import lingvo_gshard as gshard
from benchmarks.parity.cases import CASES
from benchmarks.peer_python import find_python
from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.shards import read_headers
from lingvo_gshard.wings.open_models.wrappers import facts
from tests.open_models import published
from tests.open_models.translation import models

GEMMA3 = "gemma3_text, two rotations, norms of queries and keys"
GEMMA4 = "gemma4_text, keys for values in full attention, heads of two sizes, soft cap"
QWEN3 = "qwen3, norms of queries and keys"
E2B = next(case.name for case in CASES if case.values.get("num_kv_shared_layers"))
# Wrapper, or another of its models -> the case of its text part, and how its tensors begin.
WHOLE = {
    "gemma3": (GEMMA3, "language_model.model."),
    "gemma4": (
        "gemma4_text, experts beside the feed-forward layer, biases, two rotations",
        "model.language_model.",
    ),
    "gemma4, E2B": (E2B, "model.language_model."),
    "gemma4_unified": (GEMMA4, "model.language_model."),
    "qwen3_vl": (QWEN3, "model.language_model."),
    "mistral3": ("mistral, sliding window", "language_model.model."),
    "llama4": (
        "llama4_text, chunks and warmer queries, shorter than the texts",
        "language_model.model.",
    ),
    "kimi_k25": (
        "deepseek_v3, latent attention, groups, selection bias, YaRN",
        "language_model.model.",
    ),
    "qwen3_5": (
        "qwen3_5_text, gated delta nets, values of another size",
        "model.language_model.",
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text, gated delta nets, experts", "model.language_model."),
    "qwen3_vl_moe": ("qwen3_moe, normalized gates", "model.language_model."),
}
# Wrappers whose files have one tensor for the experts of a layer -> whether each is transposed.
FUSED = {"qwen3_5_moe": False, "qwen3_vl_moe": True}
# Rows and columns of fused experts can only be told apart if their numbers differ.
SIZES = dict.fromkeys(FUSED, {"moe_intermediate_size": 20})
# Wrappers that the slow test does not make: their vision models cannot be small.
NOT_MADE = ("kimi_k25", "qwen3_5_moe")
VISION = {
    "gemma3": "vision_tower.x",
    "gemma4": "model.embed_audio.x",
    "gemma4_unified": "model.embed_vision.x",
    "qwen3_vl": "model.visual.x",
    "mistral3": "multi_modal_projector.x",
    "llama4": "vision_model.x",
    "kimi_k25": "vision_tower.x",
    "qwen3_5": "model.visual.x",
    "qwen3_5_moe": "model.visual.x",
    "qwen3_vl_moe": "model.visual.x",
}
PEER = """
import json, sys, numpy, torch, transformers
from transformers.models import auto
setup = json.load(open(sys.argv[1]))
torch.manual_seed(0)
config = transformers.AutoConfig.for_model(setup["model_type"], **setup["config"])
model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
with torch.no_grad():
    for name, weight in model.named_parameters():
        weight.normal_(float("norm" in name and setup["model_type"] != "gemma3"), 0.15)
model.eval().save_pretrained(setup["directory"])
with torch.no_grad():
    logits = model(input_ids=torch.tensor(setup["ids"])).logits
numpy.save(setup["logits"], logits.numpy())
"""


def fused(tensors, is_transposed):
    """Returns the tensors with one for the experts of a layer, as published."""
    found, matrices = {}, {}
    for name, tensor in tensors.items():
        layer, experts, rest = name.partition(".experts.")
        if not experts or not rest[0].isdigit():
            found[name] = tensor
            continue
        number, part, _ = rest.split(".")
        matrices.setdefault(f"{layer}.experts", {}).setdefault(part, {})[int(number)] = tensor
    for layer, parts in matrices.items():
        stacked = {part: np.stack([by[i] for i in sorted(by)]) for part, by in parts.items()}
        both = np.concatenate([stacked["gate_proj"], stacked["up_proj"]], 1)
        for name, tensor in (("gate_up_proj", both), ("down_proj", stacked["down_proj"])):
            turned = tensor.swapaxes(1, 2) if is_transposed else tensor
            found[f"{layer}.{name}"] = np.ascontiguousarray(turned)
    return found


def write_whole(directory, wrapper, **config):
    """Writes a whole model; returns the language model's directory and tensors."""
    case, beginning = WHOLE[wrapper]
    wrapper = wrapper.partition(",")[0]
    config = SIZES.get(wrapper, {}) | config
    alone = directory.parent / "alone"
    tensors = models.write(alone, case, **config)
    directory.mkdir()
    text = json.loads((alone / "config.json").read_text())
    if wrapper.startswith("qwen3_vl"):
        text["model_type"] = f"{wrapper}_text"
        text["rope_scaling"] = {"rope_type": "default", "mrope_section": [2, 1, 1]}
        text["rope_theta"] = 10000.0
    values = {
        "model_type": wrapper,
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 8},
        "image_token_index": 7,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(values))
    named = {beginning + n.removeprefix("model."): t for n, t in tensors.items() if "lm_" not in n}
    if "lm_head.weight" in tensors:
        head = (
            "lm_head.weight" if beginning.startswith("model.") else "language_model.lm_head.weight"
        )
        named[head] = tensors["lm_head.weight"]
    named[VISION[wrapper]] = np.zeros(3, np.float32)
    if wrapper in FUSED:
        named = fused(named, FUSED[wrapper])
    safetensors.numpy.save_file(named, directory / "model.safetensors")
    for folder in (directory, alone):
        published.write_tokenizer(folder)
    return alone, tensors


@pytest.mark.parametrize("wrapper", WHOLE)
def test_the_text_part_is_imported_and_exported_as_a_language_model(wrapper, tmp_path):
    alone, tensors = write_whole(tmp_path / "whole", wrapper)
    found = gshard.import_model(tmp_path / "whole", tmp_path / "run", length=16)
    assert (found.tensors, found.left_out) == (len(tensors), 1)
    gshard.import_model(alone, tmp_path / "other", length=16)
    run, other = gshard.load(tmp_path / "run"), gshard.load(tmp_path / "other")
    assert run.params.task == other.params.task
    run.export(tmp_path / "out", "huggingface")
    exported = read_headers(tmp_path / "out")
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(exported[name].read(), tensor)
    config = PublishedConfig.load(tmp_path / "out")
    assert not config.is_part and config.values["eos_token_id"] == 2
    gshard.import_model(tmp_path / "out", tmp_path / "again", length=16)


def test_the_whole_config_says_whether_the_table_is_shared(tmp_path):
    write_whole(tmp_path / "whole", "qwen3_vl")
    path = tmp_path / "whole" / "config.json"
    values = json.loads(path.read_text())
    assert not gshard.open_model(path).task.tie_softmax
    path.write_text(json.dumps(values | {"tie_word_embeddings": True}))
    assert gshard.open_model(path).task.tie_softmax


def test_a_language_model_without_a_type_has_that_of_the_whole(tmp_path):
    usual = {"kimi_k25": "deepseek_v3", "mistral3": "mistral", "qwen3_vl": "qwen3"}
    usual |= {"qwen3_vl_moe": "qwen3_moe", "gemma4_unified": "gemma4_text"}
    for wrapper in facts().texts:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": wrapper, "text_config": {"hidden_size": 8}}))
        found = PublishedConfig.load(path).values["model_type"]
        assert found == usual.get(wrapper, f"{wrapper}_text")


def test_a_config_without_its_language_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(ValueError, match="lacks text_config, in which a gemma3 has its language"):
        gshard.open_model(tmp_path)


def test_fused_experts_of_another_shape_are_refused(tmp_path):
    write_whole(tmp_path / "whole", "qwen3_vl_moe")
    file = tmp_path / "whole" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    safetensors.numpy.save_file(tensors | {name: tensors[name][:, :-1]}, file)
    with pytest.raises(ValueError, match="matrices of 40 x 48 were expected for each expert"):
        gshard.import_model(tmp_path / "whole", tmp_path / "run", length=16)


def test_names_that_transformers_writes_are_imported_and_exported_as_published(tmp_path):
    name = "kimi_linear, Kimi delta attention and latent attention without positions, experts"
    tensors = models.write(tmp_path / "model", name)
    published.write_tokenizer(tmp_path / "model")
    written = {name.replace(".mlp.", ".block_sparse_moe."): x for name, x in tensors.items()}
    assert len(written) == len(tensors) and written.keys() != tensors.keys()
    safetensors.numpy.save_file(written, tmp_path / "model" / "model.safetensors")
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=16)
    gshard.load(tmp_path / "run").export(tmp_path / "out", "huggingface")
    exported = read_headers(tmp_path / "out")
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(exported[name].read(), tensor)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [each for each in WHOLE if each not in NOT_MADE])
def test_logits_are_those_of_the_whole_model(wrapper, tmp_path):
    python = find_python(os.environ.get("PEERS_PYTHON"), ("torch", "transformers"))
    if not python:
        pytest.skip("transformers is not installed, and PEERS_PYTHON names no Python with it")
    text = models.case_of(WHOLE[wrapper][0]).values | SIZES.get(wrapper, {})
    if wrapper == "mistral3":
        text["model_type"] = "mistral"
    if wrapper.startswith("qwen3_vl"):
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        text["rope_parameters"] = rope
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 16, "image_size": 28, "patch_size": 14}
    vision = {
        "gemma3": small,
        "gemma4": None,
        "gemma4_unified": None,
        "mistral3": small | {"model_type": "pixtral", "head_dim": 8},
        "qwen3_vl": {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16}
        | {"out_hidden_size": 48, "deepstack_visual_indexes": [0], "patch_size": 14},
        "llama4": small
        | {"intermediate_size": 64, "projector_input_dim": 16, "projector_output_dim": 16}
        | {"vision_output_dim": 16},
    }
    vision["gemma4, E2B"] = None
    vision["qwen3_vl_moe"] = vision["qwen3_vl"]
    vision["qwen3_5"] = {k: v for k, v in vision["qwen3_vl"].items() if "deepstack" not in k}
    rng = np.random.default_rng(0)
    setup = {
        "model_type": wrapper.partition(",")[0],
        "config": {"text_config": text, "vision_config": vision[wrapper]}
        | {"tie_word_embeddings": wrapper != "llama4"},
        "directory": str(tmp_path / "whole"),
        "logits": str(tmp_path / "logits.npy"),
        "ids": rng.integers(10, 300, (2, 12)).tolist(),
    }
    (tmp_path / "setup.json").write_text(json.dumps(setup))
    command = [python, "-c", PEER, str(tmp_path / "setup.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    published.write_tokenizer(tmp_path / "whole")
    gshard.import_model(tmp_path / "whole", tmp_path / "run", length=16)
    run = gshard.load(tmp_path / "run")
    row = tf.constant(setup["ids"], tf.int32)
    batch = {"target_inputs": row, "target_segments": tf.ones_like(row)}
    batch["target_positions"] = tf.tile(tf.range(12)[None], (2, 1))
    theta = run.model.theta.transform(tf.convert_to_tensor)
    with context.scope(training=False):
        found = run.model.task.logits(theta, batch).numpy()
    np.testing.assert_allclose(found, np.load(setup["logits"]), atol=1e-4, rtol=1e-4)
