# tests: wings/open_models/families/experts.py, wings/open_models/families/family.py
"""Compares weighted router losses of imported models with those of transformers."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.parity.cases import CASES
from lingvo_gshard.core import context
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import FAMILIES
from tests.open_models.translation import models

COEFFICIENT = 0.02
EXPERTS, TOKENS = 4, 32


def published_loss(logits_by_layer: list[np.ndarray], k: int) -> float:
    """Returns the loss of all layers as transformers computes it.

    `load_balancing_loss_func` of models/mixtral/modeling_mixtral.py in transformers 5.23, which
    gpt-oss, OLMoE, Qwen3-MoE and NLLB-MoE have, too. With k = 1 and one row of tokens, it is also
    that of models/switch_transformers/modeling_switch_transformers.py.
    """
    counts, gates, tokens = np.zeros(EXPERTS), np.zeros(EXPERTS), 0
    for logits in logits_by_layer:
        for row in logits.astype(np.float64):
            gate = np.exp(row - row.max())
            gates += gate / gate.sum()
            counts[np.argsort(-row)[:k]] += 1
            tokens += 1
    return float(EXPERTS * np.sum(counts / tokens * gates / tokens))


def case_named(model_type: str):
    if model_type in ("nllb-moe", "switch_transformers"):
        return next(case for case in models.CASES if case.model_type == model_type)
    return next(case for case in CASES if case.model_type == model_type)


def task_of(model_type: str):
    case = case_named(model_type)
    names = ("num_experts", "num_local_experts")
    values = {name: value for name, value in case.values.items() if name not in names}
    values |= dict.fromkeys((name for name in names if name in case.values), EXPERTS)
    coefficients = {"router_aux_loss_coef": COEFFICIENT}
    if model_type in ("nllb-moe", "switch_transformers"):
        coefficients["router_z_loss_coef"] = COEFFICIENT
    norm = {} if case.start else {"rms_norm_eps": 1e-6}
    config = PublishedConfig(
        {"model_type": model_type} | norm | values | coefficients, "config.json"
    )
    return FAMILIES[model_type].task_of(config)


def weighted_losses(router, logits: np.ndarray) -> dict[str, float]:
    """Returns the losses that a router of given logits adds to the training loss."""
    p = router.copy().set(model_dim=EXPERTS, num_experts=EXPERTS, use_bias=False, jitter=0.0)
    layer = p.instantiate(path="router")
    theta = layer.init(0)
    theta.w_gate = tf.eye(EXPERTS)
    with context.scope(training=True, seed=tf.constant([1, 0])):
        routing = layer.fprop(theta, tf.constant(logits[None]), tf.ones((1, len(logits))))
    return {name: float(loss.value) * loss.weight for name, loss in routing.losses.items()}


@pytest.mark.parametrize(
    "model_type",
    ["gpt_oss", "mixtral", "nllb-moe", "olmoe", "qwen3_moe", "switch_transformers"],
)
def test_the_losses_of_all_layers_are_those_of_transformers(model_type):
    task = task_of(model_type)
    specs = task.instantiate(path="").variable_specs().flatten()
    specs = [spec for spec in specs if spec.path.endswith(".router.w_gate")]
    for side in ("encoder", "decoder"):
        if side not in task:
            continue
        stack = task.get(side)
        count = sum(max(len(spec.slices), 1) for spec in specs if spec.path.startswith(side))
        k = int(stack.moe.router.cls.experts_per_token(stack.moe.router))
        logits = np.random.default_rng(0).normal(size=(TOKENS, EXPERTS)).astype(np.float32)
        # All layers have the same loads, in which one loss of all is the mean of theirs.
        found = weighted_losses(stack.moe.router, logits)
        expected = COEFFICIENT * published_loss([logits] * count, k)
        np.testing.assert_allclose(count * found["auxiliary_loss"], expected, rtol=1e-5)
        if "z_loss" in found:
            mean = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
            np.testing.assert_allclose(count * found["z_loss"], COEFFICIENT * mean, rtol=1e-5)


def test_the_weight_of_mixtral():
    # 32 layers, 2 experts per token: 16 times less than the coefficient.
    from_config = task_of("mixtral")
    layers = from_config.decoder.num_layers
    assert from_config.decoder.moe.router.auxiliary_loss_weight == COEFFICIENT * 2 / layers


def test_deepseek_publishes_the_loss_by_layer():
    case = case_named("deepseek_v2")
    values = {"rms_norm_eps": 1e-6, **case.values, "aux_loss_alpha": COEFFICIENT}
    config = PublishedConfig({"model_type": "deepseek_v2"} | values, "config.json")
    task = FAMILIES["deepseek_v2"].task_of(config)
    assert task.decoder.moe.router.auxiliary_loss_weight == COEFFICIENT
    assert FAMILIES["deepseek_v2"].config_of(task)["aux_loss_alpha"] == COEFFICIENT


@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral", "nllb-moe", "switch_transformers"])
def test_export_gives_the_coefficient_back(model_type):
    described = FAMILIES[model_type].config_of(task_of(model_type))
    assert described["router_aux_loss_coef"] == COEFFICIENT
