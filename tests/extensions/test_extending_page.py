# tests: /docs/extending.md, layers/product_rules.py
"""Tests the examples of docs/extending.md: each builds, computes and is selected by gin."""

import importlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.core import context
from lingvo_gshard.layers import Experts, FeedForward
from lingvo_gshard.layers.embedding import Softmax
from lingvo_gshard.tools import plan
from lingvo_gshard.training import PRECISIONS, make_trainer
from lingvo_gshard.wings.planning.machines import chips, topologies
from tests.test_docs import ROOT, write_files

MODULES = ("my_router", "my_optimizer", "my_rounding", "my_reader", "my_service", "my_chip")


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory):
    """Writes the page's files into a directory that is on the path; returns the directory."""
    folder = tmp_path_factory.mktemp("extending")
    written = write_files((ROOT / "docs" / "extending.md").read_text("utf-8"), folder)
    assert [path.stem for path in written if path.stem.startswith("my_")] == list(MODULES)
    sys.path.append(str(folder))
    known = dict(PRECISIONS.items())
    yield folder
    PRECISIONS._features = known
    sys.path.remove(str(folder))
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_router_sends_each_token_to_its_largest_logit():
    router = "task.encoder.moe.router"
    # With room for all tokens no gate is 0.
    settings = [f"{router} = @my_router.SigmoidTop1", f"{router}.evaluation_capacity_factor = 8.0"]
    task = make_trainer(experiment("translation.quickstart", settings)).task
    moe = task.encoder.layers[1].feed_forward.router
    assert type(moe).__name__ == "SigmoidTop1"
    theta, x = moe.init(1), np.random.default_rng(0).normal(size=(2, 6, moe.p.model_dim))
    x = tf.constant(x, tf.float32)
    with context.scope(training=False):
        routing = moe.fprop(theta, x, tf.ones([2, 6]))
    logits = np.einsum("GSM,ME->GSE", x, theta.w_gate)
    (choice,) = routing.assignments
    np.testing.assert_array_equal(choice.expert_GS, logits.argmax(-1))
    np.testing.assert_allclose(choice.gate_GS, 1 / (1 + np.exp(-logits.max(-1))), rtol=1e-5)


def test_the_optimizer_is_selected_with_its_params():
    settings = ["step.optimizer = @my_optimizer.RootMeanSquare", "step.optimizer.decay = 0.5"]
    trainer = make_trainer(experiment("translation.quickstart", settings))
    assert trainer.optimizer.p.decay == 0.5
    moments = trainer.optimizer.moment_specs(trainer.theta_specs)
    assert len(moments.flatten()) == len(trainer.theta_specs.flatten())
    with pytest.raises(ValueError, match="step.optimizer.decay is 1.5; expected a number of 0"):
        experiment("translation.quickstart", [settings[0], "step.optimizer.decay = 1.5"])


@pytest.fixture(scope="module")
def six_bits():
    """Returns the extensions of a pass in the page's precision, as a trainer has them."""
    importlib.import_module("my_rounding")
    settings = ["step.precision = 'six_bits'"]
    return make_trainer(experiment("language_model.quickstart", settings)).precision.extensions


def of_six_bits(x):
    scale = np.abs(x).max() / 31
    return np.round(x / scale) * scale


ROWS_EGCM = np.random.default_rng(0).normal(size=(2, 1, 3, 8)).astype(np.float32)
SIZES = {"model_dim": 8, "hidden_dim": 6, "use_bias": False}


@pytest.mark.parametrize("layer", ["feed_forward", "experts"])
def test_the_rule_rounds_the_factors_of_every_product_and_not_their_gradients(six_bits, layer):
    if layer == "experts":
        params, rows, h_layout = Experts.params().set(num_experts=2, **SIZES), ROWS_EGCM, "EGCH"
        equation, inputs = "EGCM,EMH->EGCH", ()
    else:
        params, rows, h_layout = FeedForward.params().set(**SIZES), ROWS_EGCM[0], "BLH"
        equation, inputs = "BLM,MH->BLH", (tf.ones([1, 3]),)
    made = params.instantiate()
    theta, x = made.init(1), tf.constant(rows)
    with context.use(context.Context(training=True, extensions=six_bits)):
        with tf.GradientTape() as tape:
            tape.watch(theta.w_out)
            y = made.fprop(theta, x, *inputs)
    w_in, w_out = (of_six_bits(w.numpy()) for w in (theta.w_in, theta.w_out))
    h = of_six_bits(np.maximum(np.einsum(equation, of_six_bits(rows), w_in), 0))
    back = {"EGCH": "EGCH,EHM->EGCM", "BLH": "BLH,HM->BLM"}[h_layout]
    np.testing.assert_allclose(y, np.einsum(back, h, w_out), rtol=1e-4, atol=1e-5)
    left, right, result = back.replace("->", ",").split(",")
    expected = np.einsum(f"{left},{result}->{right}", h, np.ones_like(y))
    np.testing.assert_allclose(tape.gradient(y, theta.w_out), expected, rtol=1e-4, atol=1e-5)


def test_the_rule_leaves_logits_as_they_are(six_bits):
    softmax = Softmax.params().set(vocabulary_size=7, model_dim=8).instantiate()
    theta = softmax.init(1)
    with context.use(context.Context(training=True, extensions=six_bits)):
        logits = softmax.fprop(theta, tf.constant(ROWS_EGCM[0]))
    np.testing.assert_allclose(logits, ROWS_EGCM[0] @ theta.w.numpy(), rtol=1e-5, atol=1e-6)


def test_the_reader_reads_rows_and_names_bad_ones(tmp_path):
    file = tmp_path / "train.arrows"
    file.write_text("gl: Gardar => Save\nno arrow\n", "utf-8")
    reader = importlib.import_module("my_reader").ArrowReader
    params = reader.params().set(train=str(file), dev=str(file), on_bad_row="skip")
    rows = params.instantiate().rows("train")
    assert [row[:3] for row in rows] == [("gl", "Gardar", "Save")]
    with pytest.raises(ValueError, match=r"train.arrows:2: not `language: source => target`"):
        params.set(on_bad_row="refuse").instantiate().rows("train")


def test_a_module_that_is_not_here_is_an_error_that_says_where_it_is_searched():
    with pytest.raises(ValueError, match="no_such_module.* in the current directory or on PYTHONP"):
        experiment("translation.quickstart", ["step.optimizer = @no_such_module.Optimizer"])
    with pytest.raises(ValueError, match="module no_such_module is neither installed nor in the c"):
        experiment("no_such_module.mine")


def test_the_chip_is_planned_for(monkeypatch, capsys):
    monkeypatch.setattr(chips, "CHIPS", dict(chips.CHIPS))
    assert plan.main(["gshard-plan", "--import=my_chip", "--list_topologies"]) == 0
    assert "gpu:h100-96gb:8x8" in capsys.readouterr().out
    assert topologies.get("gpu:h100-96gb:2x8").chip.usable_bytes == 72 * 2**30
