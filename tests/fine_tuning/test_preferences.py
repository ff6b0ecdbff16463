"""Tests direct preference optimization against NumPy, and that the reference stays as it was."""

import numpy as np
import pytest
import rich.console

import lingvo_gshard as gshard
from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.wings.fine_tuning.preferences import without_reference
from tests.fine_tuning.conversations import chat_models
from tests.fine_tuning.conversations.test_preference_input import PREFERENCES, preferences
from tests.open_models import llama_reference

QUIET = rich.console.Console(quiet=True)
CLASS = "@lingvo_gshard.wings.fine_tuning.conversations.preference_input.PreferenceInput"
BETA, SMOOTHING = 0.3, 0.1
LORA = ("task.lora.rank = 2", "task.lora.weights = ('*.w_query', '*.w_value')")


def settings_of(folder, *more):
    files = f"('{folder}/pairs.jsonl',)"
    return (
        f"input = {CLASS}",
        f"input.corpus.train = {files}",
        f"input.corpus.dev = {files}",
        "input.length = 32",
        "input.batch_rows = 8",
        "input.pairs_per_row = 2",
        f"task.preferences.beta = {BETA}",
        "step.schedule.warmup_steps = 1",
        "step.schedule.learning_rate = 1e-2",
        "run.log_every_steps = 1",
        *more,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a model and pairs."""
    directory = tmp_path_factory.mktemp("preferences")
    chat_models.write(directory / "model")
    chat_models.write_lines(directory / "pairs.jsonl", PREFERENCES)
    return directory


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_probabilities(logits_BLV, labels_BL):
    """Returns float64 [B,L]."""
    logits = logits_BLV.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(logits, labels_BL[..., None], -1)[..., 0], np.exp(logits)


def expected(logits, before, batch):
    """Returns the loss, its gradient for the logits, and the margins, pair by pair."""
    own, shares = log_probabilities(logits, batch["target_labels"])
    ref, _ = log_probabilities(before, batch["target_labels"])
    gradient, losses, margins = np.zeros_like(shares), [], []
    one_hot = np.eye(shares.shape[-1])[batch["target_labels"]]
    pairs = [(b, 2 * j + 1) for b, j in np.argwhere(batch["pairs"] == 1)]
    for row, first in pairs:
        masks = [
            (batch["target_segments"][row] == s) & (batch["target_marks"][row] == 1)
            for s in (first, first + 1)
        ]
        chosen, rejected = ((own[row] - ref[row])[mask].sum() for mask in masks)
        margin = BETA * (chosen - rejected)
        margins.append(margin)
        losses.append(
            -(1 - SMOOTHING) * np.log(sigmoid(margin)) - SMOOTHING * np.log(sigmoid(-margin))
        )
        slope = -(1 - SMOOTHING) * sigmoid(-margin) + SMOOTHING * sigmoid(margin)
        for mask, sign in zip(masks, (1, -1), strict=True):
            change = sign * slope * BETA / len(pairs) * (one_hot[row] - shares[row])
            gradient[row] += np.where(mask[:, None], change, 0.0)
    return np.mean(losses), gradient, margins


def test_loss_and_gradients_are_those_of_numpy(folder):
    settings = settings_of(folder, f"task.preferences.label_smoothing = {SMOOTHING}")
    params = gshard.open_model(folder / "model", length=32, settings=settings)
    task = params.task.instantiate()
    assert task.guessing_loss() is None and task.plain.guessing_loss() == np.log(24)
    (batch, *_) = preferences(folder, length=32, batch_rows=8).evaluation_batches("dev")
    rng = np.random.default_rng(1)
    theta = task.variable_specs().transform(
        lambda spec: tf.constant(rng.normal(size=spec.shape, scale=0.5), spec.dtype)
    )
    tensors = {name: tf.constant(array) for name, array in batch.items()}
    with tf.GradientTape(persistent=True) as tape, context.scope(training=False):
        tape.watch(theta.flatten())
        logits_BLV = task.logits(theta, tensors)
        before_BLV = task.reference.logits(theta.reference, tensors)
        loss, metrics = task.loss(theta, tensors)
    wanted, d_logits, margins = expected(logits_BLV.numpy(), before_BLV.numpy(), batch)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert float(metrics["margin"][0]) == pytest.approx(np.mean(margins), rel=1e-4)
    assert float(metrics["accuracy"][0]) == pytest.approx(np.mean(np.array(margins) > 0))
    own = without_reference(theta)
    found = tape.gradient(loss, own.flatten())
    for one, other in zip(
        found,
        tape.gradient(logits_BLV, own.flatten(), tf.constant(d_logits, tf.float32)),
        strict=True,
    ):
        one, other = map(tf.convert_to_tensor, (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert all(g is None for g in tape.gradient(loss, theta.reference.flatten()))


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), LORA], ids=["full", "adapters"])
def test_training_moves_the_model_and_not_the_reference(folder, tmp_path, more):
    params = gshard.open_model(folder / "model", length=32, settings=settings_of(folder, *more))
    first = {}
    meshes = {
        "one": {},
        "tensor_fsdp": {"mesh": "data=4,model=2", "strategy": "tensor_fsdp"},
        "fsdp": {"mesh": "data=8", "strategy": "fsdp"},
        "zero1": {"mesh": "data=8", "strategy": "zero1"},
        "sequence": {"mesh": "data=2,model=4", "strategy": "tensor_sequence"},
    }
    for name, options in meshes.items():
        outcome = gshard.train(
            params,
            tmp_path / name,
            init_from=folder / "model",
            steps=3,
            console=QUIET,
            **options,
        )
        first[name] = outcome.metrics["loss"]
        assert outcome.metrics["loss"] < np.log(2)
    assert first == pytest.approx(dict.fromkeys(meshes, first["one"]), rel=1e-4)
    run = gshard.load(tmp_path / "one")
    theta = dict(run.model.theta.flatten_items())
    tensors = chat_models.published.tensors()
    if not more:
        kept = theta["reference.embedding.w"] if "reference.embedding.w" in theta else None
        assert kept is None or not np.array_equal(kept, theta["embedding.w"])
        assert any(path.startswith("reference.") for path in theta)
    run.export(tmp_path / "out", "huggingface")
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    assert run.evaluate("dev").means["accuracy"] == 1.0
    assert llama_reference.logits(tensors, [1, 4]).shape == (2, 24)
