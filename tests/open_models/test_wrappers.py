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
from benchmarks.peer_python import find_python
from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.shards import Shards
from tests.open_models import published
from tests.open_models.translation import models

GEMMA3 = "gemma3_text, two rotations, norms of queries and keys"
QWEN3 = "qwen3, norms of queries and keys"
# Wrapper -> the case of its text part, and how its tensors begin.
WHOLE = {
    "gemma3": (GEMMA3, "language_model.model."),
    "qwen3_vl": (QWEN3, "model.language_model."),
    "mistral3": ("mistral, sliding window", "language_model.model."),
}
VISION = {
    "gemma3": "vision_tower.x",
    "qwen3_vl": "model.visual.x",
    "mistral3": "multi_modal_projector.x",
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


def write_whole(directory, wrapper, **config):
    """Writes a whole model; returns the language model's directory and tensors."""
    case, beginning = WHOLE[wrapper]
    alone = directory.parent / "alone"
    tensors = models.write(alone, case, **config)
    directory.mkdir()
    text = json.loads((alone / "config.json").read_text())
    if wrapper == "qwen3_vl":
        text["model_type"] = "qwen3_vl_text"
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
    exported = Shards(tmp_path / "out").tensors
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


def test_a_config_without_its_language_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(ValueError, match="lacks text_config, in which a gemma3 has its language"):
        gshard.open_model(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WHOLE)
def test_logits_are_those_of_the_whole_model(wrapper, tmp_path):
    python = find_python(os.environ.get("PEERS_PYTHON"), ("torch", "transformers"))
    if not python:
        pytest.skip("transformers is not installed, and PEERS_PYTHON names no Python with it")
    text = dict(models.case_of(WHOLE[wrapper][0]).values)
    if wrapper == "mistral3":
        text["model_type"] = "mistral"
    if wrapper == "qwen3_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        text["rope_parameters"] = rope
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 16, "image_size": 28, "patch_size": 14}
    vision = {
        "gemma3": small,
        "mistral3": small | {"model_type": "pixtral", "head_dim": 8},
        "qwen3_vl": {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16}
        | {"out_hidden_size": 48, "deepstack_visual_indexes": [0], "patch_size": 14},
    }[wrapper]
    rng = np.random.default_rng(0)
    setup = {
        "model_type": wrapper,
        "config": {"text_config": text, "vision_config": vision, "tie_word_embeddings": True},
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
