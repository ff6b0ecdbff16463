# tests: wings/fine_tuning/lora.py, wings/fine_tuning/adapters.py, layers/product_rules.py
"""Tests LoRA: losses and gradients against merged weights, what is frozen, and wrong patterns."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.fine_tuning.adapters import is_factor
from lingvo_gshard.wings.published_layers.compressed_attention import CompressedAttention
from lingvo_gshard.wings.published_layers.latent_attention import LatentAttention
from lingvo_gshard.wings.repeat.loop import Repeat
from tests.training.lora_model import batch, random_factors, task_params

KEY = (1, 1)


def make_trainer(task, **values):
    return Trainer.params().set(**values).instantiate(task)


def gradients(trainer, theta, compiled=False):
    def run(weights):
        tensors = {name: tf.constant(array) for name, array in batch().items()}
        return trainer.gradients(theta.pack(weights), tensors, tf.constant(KEY))

    loss, _, found = (tf.function(run) if compiled else run)(theta.flatten())
    return float(loss), dict(found.flatten_items())


def merged_by_hand(specs, theta, scale):
    """Returns NumPy weights without factors, by path: W + scale A B, product by product."""
    specs, arrays = dict(specs.flatten_items()), dict(theta.flatten_items())
    found = {path: value.numpy() for path, value in arrays.items() if not is_factor(path)}
    for path in arrays:
        if is_factor(path) and path.endswith("_a"):
            other, base = f"{path[:-2]}_b", path[:-2].replace(".lora.", ".")
            layouts = [specs[p].layout for p in (path, other, base)]
            equation = f"{layouts[0]},{layouts[1]}->{layouts[2]}"
            product = np.einsum(equation, arrays[path].numpy(), arrays[other].numpy())
            found[base] = found[base] + scale * product
    return found


CASES = {
    "experts": {},
    "loop": {"execution": Repeat.params()},
    "remat": {"execution.rematerialize": "full"},
    "dropless": {"moe.dispatch": DroplessDispatch.params()},
    "latent": {
        "layer.self_attention": LatentAttention.params().set(
            query_rank=6, key_value_rank=4, plain_dim=4, rotary_dim=2, value_dim=4
        )
    },
    "groups": {
        "layer.self_attention": CompressedAttention.params().set(
            **{"window": 3, "query_rank": 6, "head_dim": 4, "rotary_dim": 2, "output_rank": 3},
            **{"output_groups": 2, "compressed": 2, "index_heads": 2, "index_dim": 4},
        )
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if CASES[n] else []) for n in CASES]
)
def test_gradients_are_those_of_merged_weights(name):
    trainer = make_trainer(task_params(**CASES[name]))
    theta = random_factors(trainer.init_state().theta)
    loss, found = gradients(trainer, theta, bool(CASES[name]))
    plain = make_trainer(trainer.task.plain.p)
    by_hand = merged_by_hand(trainer.theta_specs, theta, scale=2.0)
    weights = plain.theta_specs.pack(
        tf.constant(by_hand[path]) for path, _ in plain.theta_specs.flatten_items()
    )
    expected_loss, full = gradients(plain, weights, bool(CASES[name]))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    specs, arrays = dict(trainer.theta_specs.flatten_items()), dict(theta.flatten_items())
    factors = [path for path in found if is_factor(path)]
    assert len(factors) > 8
    for path in found:
        if not is_factor(path):
            assert not found[path].numpy().any()
            continue
        other = path[:-1] + "ba"[path.endswith("_b")]
        base = path[:-2].replace(".lora.", ".")
        equation = f"{specs[base].layout},{specs[other].layout}->{specs[path].layout}"
        expected = 2.0 * np.einsum(equation, full[base].numpy(), arrays[other].numpy())
        np.testing.assert_allclose(found[path], expected, rtol=2e-4, atol=1e-6, err_msg=path)
    merged = trainer.task.merged(theta)
    for path, value in merged.flatten_items():
        np.testing.assert_allclose(value, by_hand[path], rtol=1e-6, atol=1e-6)
    assert merged.flatten_items()[0][0] == weights.flatten_items()[0][0]


def test_a_step_begins_at_the_base_model_and_moves_factors_only():
    trainer, plain = make_trainer(task_params()), make_trainer(task_params(rank=0))
    state, base = trainer.init_state(), plain.init_state()
    paths = dict(base.theta.flatten_items())
    for path, weight in state.theta.flatten_items():
        if not is_factor(path):
            np.testing.assert_array_equal(weight, paths[path])
    constants = {name: tf.constant(array) for name, array in batch().items()}
    with context.scope(training=False):
        ours = trainer.task.logits(state.theta, constants)
        theirs = plain.task.logits(base.theta, constants)
    np.testing.assert_array_equal(ours, theirs)
    first, metrics = trainer.train_step(state, constants)
    second, _ = trainer.train_step(first, constants)
    for (path, before), after in zip(
        state.theta.flatten_items(), second.theta.flatten(), strict=True
    ):
        assert (before.numpy() != after.numpy()).any() == is_factor(path), path
    owners = {path.partition("/")[0] for path, _ in state.moments.flatten_items()}
    assert owners and all(".lora." in owner for owner in owners)
    assert float(metrics.gradient_norm) > 0


@pytest.mark.parametrize("count", [1, 2])
def test_dropout_and_micro_batches_leave_frozen_weights_alone(count):
    task = task_params(weights=("*.w_query",))
    task.lora.input_dropout = 0.5
    trainer = make_trainer(task, micro_batches=count)
    theta = random_factors(trainer.init_state().theta)
    _, found = gradients(trainer, theta)
    moved = {path for path, gradient in found.items() if gradient.numpy().any()}
    assert moved == {path for path in found if is_factor(path)} and len(moved) == 4


@pytest.mark.slow
def test_factors_stay_wide_with_narrow_weights():
    trainer = make_trainer(task_params(), precision="bfloat16_weights")
    state = trainer.init_state()
    step = tf.function(lambda s: trainer.train_step(state.pack(s), batch())[0].flatten())
    after = state.pack(step(step(state.flatten())))
    for (path, before), new in zip(state.theta.flatten_items(), after.theta.flatten(), strict=True):
        assert before.dtype == (tf.float32 if is_factor(path) else tf.bfloat16)
        changed = (tf.cast(before, tf.float32) != tf.cast(new, tf.float32)).numpy().any()
        assert changed == is_factor(path), path


def test_more_weights_can_be_trained():
    factors = {"*norm": 0.5}
    params = Trainer.params()
    params.optimizer.learning_rate_factors = factors
    trainer = params.instantiate(task_params())
    specs = trainer.theta_specs.flatten()
    trained = [spec.path for spec in specs if trainer.optimizer.moves(spec)]
    # What the outer optimizer of local updates moves.
    assert trained == [spec.path for spec in specs if not spec.is_frozen]
    assert any(path.endswith("norm.scale") for path in trained)
    assert all("norm" in path or is_factor(path) for path in trained)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (("*.w_qery",), r"task\.lora\.weights: no layer .* '\*\.w_qery'. Did you mean"),
        (("decoder.final_norm",), r"task\.lora\.weights: 'decoder.final_norm' matches no weight"),
        ("*.w_query", r"task\.lora\.weights is '\*\.w_query'; a tuple of patterns was expected"),
        ((), r"task\.lora\.weights is \(\); a tuple of patterns was expected"),
    ],
)
def test_wrong_patterns_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(task_params(weights=weights))


def test_the_merged_tree_has_no_factors():
    trainer = make_trainer(task_params())
    theta: NestedMap = trainer.init_state().theta
    names = [path for path, _ in trainer.task.merged(theta).flatten_items()]
    assert names == [path for path, _ in trainer.task.plain.variable_specs().flatten_items()]


def test_frozen_weights_get_no_adapters():
    task = task_params(weights=("*.self_attention",), **CASES["groups"]).instantiate(path="task")
    adapted = {path for path, _ in task.variable_specs().flatten_items() if is_factor(path)}
    assert any(".compressor." in path for path in adapted)
    assert not any(".index_compressor." in path for path in adapted)
