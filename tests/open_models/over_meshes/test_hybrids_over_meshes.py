# tests: wings/open_models/families/hybrids/mamba.py, wings/open_models/families/granite.py
# tests: wings/open_models/families/hybrids/nemotron_h.py
# tests: wings/published_layers/single_sublayers.py, wings/published_layers/mamba.py
# tests: wings/open_models/families/hybrids/kimi_linear.py
"""Small hybrids of recurrences and attention: their layers, and a step over a mesh in float64."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import FeedForward, MixtureOfExperts
from lingvo_gshard.layers.moe import GatherDispatch
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.pipeline.pipeline import Pipeline
from lingvo_gshard.wings.published_layers.mamba import Mamba2
from lingvo_gshard.wings.published_layers.single_sublayers import (
    NoAttention,
    NoFeedForward,
    SingleSublayerStack,
)
from tests.open_models.over_meshes.steps import MESHES, verified

_SHARED = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "granite": {
        **_SHARED,
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "intermediate_size": 8,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_d_state": 4,
        "mamba_n_heads": 4,
        "num_local_experts": 4,
        "shared_intermediate_size": 8,
    },
    "kimi": {
        **_SHARED,
        "model_type": "kimi_linear",
        "first_k_dense_replace": 0,
        "intermediate_size": 16,
        "kv_lora_rank": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 4,
        "linear_num_heads": 4,
        "moe_intermediate_size": 8,
        "num_experts": 4,
        "num_hidden_layers": 4,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
    },
    "nemotron": {
        **_SHARED,
        "model_type": "nemotron_h",
        "head_dim": 4,
        "hybrid_override_pattern": "ME*-ME*-",
        "intermediate_size": 16,
        "mamba_head_dim": 4,
        "mamba_num_heads": 4,
        "moe_intermediate_size": 8,
        "moe_latent_size": 8,
        "moe_shared_expert_intermediate_size": 8,
        "n_groups": 2,
        "n_routed_experts": 4,
        "ssm_state_size": 4,
    },
}


def experiment(name: str, execution: Params | None = None) -> Params:
    params = experiment_of(PublishedConfig(CONFIGS[name], "config.json"), length=12)
    if execution:
        params.task.decoder.execution = execution
    if execution and execution.cls is Pipeline:
        stack = params.task.decoder
        patterns = stack.feed_forward_pattern if "feed_forward_pattern" in stack else ()
        for moe in (
            stack.moe,
            *(each for each in patterns if issubclass(each.cls, MixtureOfExperts)),
        ):
            moe.dispatch = GatherDispatch.params()
    return params


def test_layers_of_each_kind_are_there():
    layers = experiment("nemotron").task.instantiate().decoder.layers_in_order()
    kinds = [
        (type(layer.self_attention).__name__, type(layer.feed_forward).__name__) for layer in layers
    ]
    assert kinds == [
        ("Mamba2", "NoFeedForward"),
        ("NoAttention", "LatentExperts"),
        ("PublishedAttention", "NoFeedForward"),
        ("NoAttention", "FeedForward"),
    ] * 2  # fmt: skip
    norms = [[name for name in layer.children if name.endswith("norm")] for layer in layers]
    assert norms == [["self_attention_norm"], ["feed_forward_norm"]] * 4


def test_a_stack_of_single_sublayers_is_their_sum():
    p = SingleSublayerStack.params().set(
        num_layers=2, model_dim=4, num_heads=2, hidden_dim=6, is_causal=True, has_final_norm=False
    )
    mamba = Mamba2.params().set(num_heads=2, head_dim=3, value_dim=2)
    p.set(
        attention_pattern=(mamba, NoAttention.params()),
        feed_forward_pattern=(NoFeedForward.params(), FeedForward.params()),
    )
    stack = p.instantiate(path="stack")
    theta = stack.init(1)
    x_BLM = tf.constant(np.random.default_rng(2).normal(size=(2, 5, 4)), tf.float32)
    segments_BL = tf.ones([2, 5], tf.int32)
    first, second = (dict(layer=layer, theta=w) for layer, w in stack.unrolled(theta))

    def sublayer(name: str, layer, theta: NestedMap, x: tf.Tensor, mask) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        norm = theta[f"{name}_norm"]
        normed = (x - mean) / tf.sqrt(variance + 1e-6) * norm.scale + norm.bias
        return x + getattr(layer, name).fprop(theta[name], normed, mask)

    mask = first["layer"].self_attention.mask(segments_BL)
    expected = sublayer("self_attention", x=x_BLM, mask=mask, **first)
    expected = sublayer("feed_forward", x=expected, mask=segments_BL, **second)
    np.testing.assert_allclose(stack.fprop(theta, x_BLM, segments_BL), expected, atol=1e-5)


def test_patterns_must_be_as_long():
    p = SingleSublayerStack.params().set(num_layers=2, attention_pattern=(NoAttention.params(),))
    with pytest.raises(UserError, match=r"feed_forward_pattern has 0 entries, .* has 1"):
        p.instantiate(path="stack")


def test_a_pipeline_refuses_loops_over_chunks():
    with pytest.raises(UserError, match="not possible with self_attention=KimiDeltaAttention"):
        experiment("kimi", MESHES["pipeline"][2]).task.instantiate()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("case", MESHES)
def test_a_step_is_that_of_one_device(name, case):
    if (name, case) == ("kimi", "pipeline"):
        pytest.skip("a pipeline refuses loops over chunks")
    mesh, strategy, execution = MESHES[case]
    verified(experiment(name, execution), mesh, strategy)
