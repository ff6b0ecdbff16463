# tests: wings/fine_tuning/adapters.py, wings/open_models/importing.py
# tests: wings/open_models/exporting.py
"""Tests fine-tuning of published models with adapters, and what becomes of the adapters."""

import json
import os
import subprocess

import numpy as np
import pytest
import rich.console
import safetensors.numpy

import lingvo_gshard as gshard
from benchmarks.peer_python import find_python
from lingvo_gshard.api.experiments import apply_settings
from lingvo_gshard.wings.fine_tuning.adapters import is_factor
from tests.open_models import llama_reference, published
from tests.open_models.test_both_ways import IDS, digests, logits_of

QUIET = rich.console.Console(quiet=True)
RANK, SCALE = 2, 4.0
LORA = (
    f"task.lora.rank = {RANK}",
    f"task.lora.alpha = {RANK * SCALE}",
    "task.lora.weights = ('*.w_query', '*.w_out', '*.w_factor')",
)
TRAINING = (
    *LORA,
    "step.schedule.warmup_steps = 1",
    "step.schedule.learning_rate = 3e-2",
    "input.batch_rows = 2",
)
ADAPTED = {"q_proj": "self_attn", "o_proj": "self_attn", "up_proj": "mlp", "down_proj": "mlp"}
PEER = """
import sys, numpy, torch, transformers, peft
base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype=torch.float32)
model = peft.PeftModel.from_pretrained(base, sys.argv[2]).eval()
ids = torch.tensor([[int(i) for i in sys.argv[3].split(",")]])
with torch.no_grad():
    numpy.save(sys.argv[4], model(input_ids=ids).logits[0].numpy())
"""


def test_an_import_with_adapters_begins_at_the_published_model(tmp_path):
    tensors = published.write(tmp_path / "model")
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=16, settings=LORA)
    run = gshard.load(tmp_path / "run")
    theta = dict(run.model.theta.flatten_items())
    factors = {path: np.asarray(value) for path, value in theta.items() if is_factor(path)}
    assert len(factors) == 8
    assert all(value.any() == path.endswith("_a") for path, value in factors.items())
    expected = llama_reference.logits(tensors, IDS)
    np.testing.assert_allclose(logits_of(run, IDS), expected, atol=2e-4, rtol=2e-4)
    run.export(tmp_path / "out", "huggingface")
    assert digests(tmp_path / "out") == digests(tmp_path / "model")


def test_wrong_patterns_and_formats_are_refused(tmp_path):
    published.write(tmp_path / "model")
    wrong = ("task.lora.rank = 2", "task.lora.weights = ('*.w_qery',)")
    with pytest.raises(ValueError, match=r"task\.lora\.weights: no .*'\*\.w_qery'.*'w_query'"):
        gshard.import_model(tmp_path / "model", tmp_path / "run", settings=wrong)
    assert not (tmp_path / "run").exists()
    gshard.import_model(tmp_path / "model", tmp_path / "run")
    with pytest.raises(ValueError, match=r"format=peft` writes adapters, and task\.lora\.rank is"):
        gshard.load(tmp_path / "run").export(tmp_path / "out", "peft")
    both = (*LORA, "step.optimizer.learning_rate_factors = {'*norm': 1.0}")
    gshard.import_model(tmp_path / "model", tmp_path / "both", settings=both)
    with pytest.raises(ValueError, match=r"adapters only, but .*norm.scale was trained, too"):
        gshard.load(tmp_path / "both").export(tmp_path / "out", "peft")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Returns (folder with the published model, its tensors, a run that was tuned from it)."""
    folder = tmp_path_factory.mktemp("tuned")
    tensors = published.write(folder / "model")
    gshard.import_model(folder / "model", folder / "base", length=16)
    params = gshard.load(folder / "base").params
    params = apply_settings(params, TRAINING, ())
    outcome = gshard.train(
        params, folder / "run", init_from=folder / "base", steps=3, console=QUIET
    )
    assert outcome.step == 3
    return folder, tensors, gshard.load(folder / "run")


@pytest.mark.slow
def test_only_adapters_are_trained_and_kept_in_moments(tuned):
    folder, _, run = tuned
    base = dict(gshard.load(folder / "base").model.theta.flatten_items())
    theta = dict(run.model.theta.flatten_items())
    for path, value in theta.items():
        if not is_factor(path):
            np.testing.assert_array_equal(value, base[path])
    assert all(np.asarray(value).any() for path, value in theta.items() if is_factor(path))
    with run.open_checkpoints() as (store, _):
        moments = store.restore(parts=("moments",)).moments
    assert moments and all(".lora." in path for path in moments)
    again = gshard.train(run.params, run.logdir.path, steps=4, console=QUIET)
    assert again.step == 4


@pytest.mark.slow
def test_a_plan_shows_what_adapters_save(tmp_path):
    published.write(tmp_path / "model", sizes={"hidden_size": 128, "intermediate_size": 512})
    plans = []
    for settings in ((), ("task.lora.rank = 1",)):
        params = gshard.open_model(tmp_path / "model", length=16, settings=settings)
        plans.append(gshard.plan(params, "cpu:2", strategy="fsdp"))
    whole, adapters = plans
    assert 20 * adapters.bytes_per_device.moments < whole.bytes_per_device.moments
    assert adapters.bytes_per_device.activations < whole.bytes_per_device.activations
    # Of three products with a weight, that of its gradient is left out.
    assert adapters.flops.executed < 0.75 * whole.flops.executed
    assert adapters.flops.useful < 0.75 * whole.flops.useful


@pytest.mark.slow
def test_an_export_has_merged_weights(tuned, tmp_path):
    folder, tensors, run = tuned
    run = gshard.load(folder / "run")
    run.export(tmp_path / "merged", "huggingface")
    run.export(tmp_path / "adapter", "peft")
    merged = safetensors.numpy.load_file(tmp_path / "merged" / "model.safetensors")
    factors = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(factors) == 2 * len(ADAPTED) * published.LAYERS
    for layer in range(published.LAYERS):
        for name, part in ADAPTED.items():
            path = f"model.layers.{layer}.{part}.{name}"
            a, b = (factors.pop(f"base_model.model.{path}.lora_{x}.weight") for x in "AB")
            expected = tensors[f"{path}.weight"] + SCALE * b @ a
            np.testing.assert_allclose(merged.pop(f"{path}.weight"), expected, rtol=1e-5, atol=1e-5)
    for name, value in merged.items():
        np.testing.assert_array_equal(value, tensors[name])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(ADAPTED) and config["r"] == RANK
    assert config["lora_alpha"] == RANK * SCALE
    weights = safetensors.numpy.load_file(tmp_path / "merged" / "model.safetensors")
    expected = llama_reference.logits(weights, IDS)
    np.testing.assert_allclose(logits_of(run, IDS), expected, atol=5e-4, rtol=5e-4)
    # Decoding multiplies by merged weights.
    (text,) = run.generate(["w5 w7"], temperature=0.0, most_tokens=3)[0]
    ids = [1, 5, 7]
    for _ in range(3):
        ids.append(int(llama_reference.logits(weights, ids)[-1].argmax()))
    assert text == run.decoder.input.vocabulary.decode(ids[1:])


@pytest.mark.slow
def test_peft_computes_the_same(tuned, tmp_path):
    python = find_python(os.environ.get("PEERS_PYTHON"), ("torch", "transformers", "peft"))
    if not python:
        pytest.skip("peft is not installed, and PEERS_PYTHON names no Python with it")
    folder, _, _ = tuned
    run = gshard.load(folder / "run")
    run.export(tmp_path / "adapter", "peft")
    command = [python, "-c", PEER, folder / "model", tmp_path / "adapter"]
    subprocess.run(
        [*command, ",".join(map(str, IDS)), tmp_path / "logits.npy"], check=True, timeout=300
    )
    theirs = np.load(tmp_path / "logits.npy")
    np.testing.assert_allclose(logits_of(run, IDS), theirs, atol=2e-4, rtol=2e-4)
