"""Stacks of Gemma 4 E2B and E4B: what layers lend and borrow, and what is refused."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import cache_shapes
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.families.gemma import GEMMA4
from tests.layers.stacks.executions import loop, pipeline, sequential
from tests.open_models.over_meshes.test_gemma4_over_meshes import DENSE, EXPERTS, SHARING

LENGTH = 6


def task_of(config: dict | None = None, **values: object) -> Params:
    """Returns the Params of a task whose decoder has some other values."""
    found = PublishedConfig(SHARING | (config or {}), "config.json")
    task = experiment_of(found, length=LENGTH).task
    task.decoder.set(**values)
    return task


def batch() -> dict:
    ids = np.random.default_rng(1).integers(3, 40, (2, LENGTH)).astype(np.int32)
    ones = np.ones_like(ids)
    arrays = {"inputs": ids, "labels": ids, "segments": ones, "positions": ones.cumsum(1) - 1}
    return {f"target_{name}": tf.constant(x) for name, x in arrays.items()}


def gradients(task, theta) -> list[np.ndarray]:
    with context.scope(training=True, seed=tf.constant([1, 2])), tf.GradientTape() as tape:
        flat = theta.flatten()
        tape.watch(flat)
        loss, _ = task.loss(theta.pack(flat), batch())
    found = tape.gradient(loss, flat)
    return [
        np.zeros(x.shape) if g is None else tf.convert_to_tensor(g).numpy()
        for x, g in zip(flat, found, strict=True)
    ]


def test_the_last_layers_borrow_from_the_last_of_their_window():
    stack = task_of().instantiate(path="task").decoder
    keys = [layer.self_attention.p.keys for layer in stack.layers_in_order()]
    assert keys == ["own", "lent", "lent", "borrowed", "borrowed"]
    shapes = [cache_shapes(layer.self_attention, 2, 8) for layer in stack.layers_in_order()]
    assert [sorted(each) for each in shapes] == [["key", "value"]] * 3 + [[], []]
    hidden = [layer.feed_forward.p.hidden_dim for layer in stack.layers_in_order()]
    assert hidden == [24, 24, 24, 48, 48]
    names = {name for name, _ in stack.layers_in_order()[-1].variable_specs().flatten_items()}
    assert not any("key" in name or "value" in name for name in names)


@pytest.mark.parametrize("policy", ["full", "products"])
def test_recomputed_layers_have_the_same_gradients(policy):
    plain = task_of().instantiate(path="task")
    theta = plain.init(1)
    recomputed = task_of(execution=sequential(policy)).instantiate(path="task")
    for expected, found in zip(gradients(plain, theta), gradients(recomputed, theta), strict=True):
        assert_close(found, expected, "float32")


def test_experts_beside_wider_feed_forward_layers():
    config = EXPERTS | {name: SHARING[name] for name in SHARING.keys() - DENSE.keys()}
    config |= {"num_hidden_layers": 3, "num_kv_shared_layers": 1}
    config |= {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    stack = task_of(config).instantiate(path="task").decoder
    sizes = [layer.feed_forward.p.shared_hidden_dim for layer in stack.layers_in_order()]
    assert sizes == [24, 24, 48]
    assert {layer.feed_forward.p.hidden_dim for layer in stack.layers_in_order()} == {8}


def test_products_that_borrowing_saves_are_not_counted():
    shape, inputs = TokenShape(2, LENGTH), 2 * 2 * LENGTH * 16
    whole, borrowing = (
        flops(
            task_of({"num_kv_shared_layers": n, "use_double_wide_mlp": False})
            .decoder.copy()
            .set(model_dim=16)
            .instantiate(path="d"),
            shape,
        )
        for n in (0, 1)
    )
    # The last layer has full attention: keys and values of 4 heads of size 8.
    assert whole - borrowing == inputs * 2 * 4 * 8
    without = (
        task_of(
            {
                "hidden_size_per_layer_input": 0,
                "use_double_wide_mlp": False,
                "num_kv_shared_layers": 1,
            }
        )
        .decoder.copy()
        .set(model_dim=16)
    )
    # A product for the input of each of 5 layers, and two in the gate.
    assert borrowing - flops(without.instantiate(path="d"), shape) == inputs * 5 * 3 * 6


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"execution": loop()}, "decoder.execution: Repeat with .*; Sequential, 1 and False were"),
        ({"execution": pipeline(5)}, "decoder.execution: Pipeline with interleaved=1 and"),
        ({"execution": sequential("none", 2)}, "Sequential with interleaved=2 and"),
        ({"borrowing_last": 4}, "decoder.borrowing_last is 4 of 5 layers; fewer were expected"),
    ],
)
def test_what_would_need_keys_that_are_elsewhere_is_refused(values, error):
    with pytest.raises(UserError, match=error):
        task_of(**values).instantiate(path="task")


def test_a_layer_outside_of_its_stack_is_refused():
    task = task_of().set(future_tokens=1).instantiate(path="task")
    with pytest.raises(UserError, match="future.*: a SharedKeysStack was expected to run this"):
        gradients(task, task.init(1))


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"num_kv_shared_layers": 4}, "config.json: num_kv_shared_layers is 4 of 5 layers; fewer"),
        ({"vocab_size_per_layer_input": 39}, "vocab_size_per_layer_input is 39; .*, 40 or more,"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1; .* 0 or more,"),
    ],
)
def test_configs_that_ask_for_what_is_not_there_are_refused(config, error):
    with pytest.raises(UserError, match=error):
        task_of(config)


def test_keys_that_files_have_for_borrowing_layers_are_left_out():
    found = GEMMA4.left_out(PublishedConfig(dict(SHARING), "config.json"))
    assert "model.layers.3.self_attn.k_proj.weight".startswith(found)
    assert "model.layers.4.self_attn.k_norm.weight".startswith(found)
    assert not "model.layers.2.self_attn.k_proj.weight".startswith(found)
    assert not "model.layers.3.self_attn.q_proj.weight".startswith(found)
