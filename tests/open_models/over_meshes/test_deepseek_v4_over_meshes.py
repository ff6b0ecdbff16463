# tests: wings/open_models/families/deepseek/deepseek_v4.py
# tests: wings/published_layers/hyper_connections.py, wings/published_layers/routers/looked_up.py
"""A training step of a small DeepSeek-V4 over a mesh equals one on one device, in float64."""

import pytest

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.layers.moe import GatherDispatch
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.pipeline.pipeline import Pipeline
from lingvo_gshard.wings.published_layers.rotary_scaling import DynamicNTKScaling
from tests.layers.stacks.executions import loop, pipeline
from tests.open_models.over_meshes.steps import MESHES, verified

CONFIG = {
    "model_type": "deepseek_v4",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "o_groups": 2,
    "o_lora_rank": 6,
    "layer_types": [
        "sliding_attention",
        *["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
    ],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
    "sliding_window": 3,
    "index_head_dim": 4,
    "index_n_heads": 4,
    "index_topk": 2,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["hash_moe", *["moe"] * 4],
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "max_position_embeddings": 16,
}


def experiment(execution: Params) -> Params:
    params = experiment_of(PublishedConfig(CONFIG, "config.json"), length=12)
    params.task.decoder.execution = execution
    if execution.cls is Pipeline:
        params.task.decoder.moe.dispatch = GatherDispatch.params()
    return params


def test_layers_of_each_kind_are_there():
    stack = experiment(loop()).task.instantiate().decoder
    attentions = [layer.self_attention.p for layer in stack.layers_in_order()]
    assert [(p.compressed, p.index_heads) for p in attentions] == [(0, 0), *[(2, 4), (3, 0)] * 2]
    routers = [type(layer.feed_forward.router).__name__ for layer in stack.layers_in_order()]
    assert routers == ["LookupRouter", *["SoftplusRouter"] * 4]
    assert stack.p.sequential_first == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_model_may_have_few_layers(count):
    config = {name: value for name, value in CONFIG.items() if not name.endswith("layer_types")}
    config = PublishedConfig({**config, "num_hidden_layers": count}, "config.json")
    stack = experiment_of(config, length=12).task.instantiate().decoder
    assert [layer.p.self_attention.compressed for layer in stack.layers_in_order()] == [3] * count


def kinds(**values):
    """Returns the tokens of a window and the router of each layer; a null removes a key."""
    config = {name: value for name, value in (CONFIG | values).items() if value is not None}
    params = experiment_of(PublishedConfig(config, "config.json"), length=12)
    layers = params.task.instantiate().decoder.layers_in_order()
    routers = [type(layer.feed_forward.router).__name__ for layer in layers]
    return [layer.p.self_attention.compressed for layer in layers], routers.count("LookupRouter")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Lists of types are cut to the number of layers, and make older keys meaningless.
        ({"num_hidden_layers": 3}, ([0, 2, 3], 1)),
        ({"compress_ratios": 7, "num_hash_layers": "no"}, ([0, 2, 3, 2, 3], 1)),
        ({"layer_types": None, "compress_ratios": [128, 0, 4, 0, 0, 9]}, ([3, 0, 2, 0, 0], 1)),
        ({"mlp_layer_types": None, "default_num_hash_layers": 2}, ([0, 2, 3, 2, 3], 2)),
        (
            {"mlp_layer_types": None, "default_num_hash_layers": 2, "num_hash_layers": -1},
            ([0, 2, 3, 2, 3], 0),
        ),
        ({"mlp_layer_types": None, "num_hash_layers": 9}, ([0, 2, 3, 2, 3], 5)),
        ({"mlp_layer_types": None}, ([0, 2, 3, 2, 3], 3)),
    ],
)
def test_older_keys_say_what_layers_are_where_no_types_are_given(values, expected):
    assert kinds(**values) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 6}, "layer_types has 5 entries for 6 layers"),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types has 4 entries for 5 layers"),
        (
            {"mlp_layer_types": ["moe", *["hash_moe"] * 4]},
            "mlp_layer_types is .*hash_moe.*expected",
        ),
        ({"layer_types": None, "compress_ratios": [0, 4]}, "compress_ratios has 2 entries for 5"),
        (
            {"layer_types": None, "compress_ratios": [7] * 5},
            "type 'compress_ratios of 7' is unknown",
        ),
    ],
)
def test_layers_of_no_known_type_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        kinds(**values)


def test_a_pipeline_needs_buffers():
    params = experiment(loop())
    params.task.decoder.execution = pipeline(2)
    with pytest.raises(UserError, match="not possible with moe.dispatch=DroplessDispatch; choose"):
        params.task.instantiate()


@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES)
def test_a_step_is_that_of_one_device(case):
    mesh, strategy, execution = MESHES[case]
    found = verified(experiment(execution), mesh, strategy)
    outputs = {each.name for each in found.compared if each.kind == "output"}
    assert "decoder.first_layers[0].self_attention" in outputs


def test_flat_rotary_parameters_are_those_of_layers_with_windows():
    rope = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    config = CONFIG | {"rope_parameters": rope, "rope_theta": 500.0}
    params = experiment_of(PublishedConfig(config, "config.json"), length=12)
    layers = params.task.instantiate().decoder.layers_in_order()
    bases = [layer.self_attention.p.rotary_base for layer in layers]
    assert bases[0] == 500.0 and set(bases[1:]) == {160_000.0}


def test_scalings_by_the_length_of_a_text_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    config = PublishedConfig(CONFIG | {"rope_parameters": rope}, "config.json")
    with pytest.raises(UserError, match="rope_parameters is .* with compressed windows, which is"):
        experiment_of(config, length=12)
    params = experiment(loop())
    params.task.decoder.attention_pattern[0].rotary_scaling = DynamicNTKScaling.params()
    with pytest.raises(UserError, match="DynamicNTKScaling depends on the lengths of texts"):
        params.task.instantiate()
