# tests: wings/open_models/config.py, wings/open_models/families/, wings/open_models/experiment.py
"""Tests configs: what they stand for, and what is refused."""

import json

import pytest

from benchmarks.parity.cases import CASES
from lingvo_gshard.core import UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.families import FAMILIES
from lingvo_gshard.wings.open_models.families.family import attention_of_layers, extra_layers
from lingvo_gshard.wings.open_models.importing import weight_specs
from lingvo_gshard.wings.open_models.weight_mapping import WeightMapping
from tests.open_models.published import CONFIG

YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 100.0}


def config(**values):
    return PublishedConfig(CONFIG | values, "config.json")


def case_config(case):
    defaults = FAMILIES[case.model_type].class_keys
    norm = {"rms_norm_eps": 1e-6} if "rms_norm_eps" in defaults else {}
    return PublishedConfig({"model_type": case.model_type} | norm | case.values, "c")


def test_a_config_is_an_experiment():
    task = experiment_of(config()).task
    assert (task.model_dim, task.decoder.num_layers, task.tie_softmax) == (8, 2, False)
    attention = task.decoder.layer.self_attention
    assert (attention.head_dim, attention.num_key_value_heads) == (4, 2)
    assert task.decoder.layer.norm.epsilon == 1e-5


def test_the_forms_of_rotary_parameters_are_equal():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0}
    old = config(rope_scaling={"type": "yarn", **scaling})
    new = config(
        rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, **scaling}
    )
    assert experiment_of(old).task == experiment_of(new).task
    found = experiment_of(old).task.decoder.layer.self_attention
    assert found.rotary_base == 100.0
    assert (found.rotary_scaling.factor, found.rotary_scaling.beta_fast) == (4.0, 16.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_task_gives_the_config_that_it_was_made_from(case):
    family, read = FAMILIES[case.model_type], case_config(case)
    task = family.task_of(read)
    described = PublishedConfig(family.config_of(task), "described")
    assert family.task_of(described) == task


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_weight_has_a_tensor(case):
    params = experiment_of(case_config(case))
    mapping = WeightMapping.of(FAMILIES[case.model_type].table, weight_specs(params))
    assert all(mapping.of_weights().values())
    has_head = not mapping.pieces.keys().isdisjoint(("lm_head.weight", "head.weight"))
    assert has_head is not params.task.tie_softmax


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "lama"},
            "the architecture 'lama' is unknown. The families are afmoe,",
        ),
        # A near name would be that of another kind of model.
        (
            {"model_type": "minimax_m9", "attn_type_list": [1], "ssm_cfg": {"d": 16}},
            "youtu. No family reads its attn_type_list, ssm_cfg.",
        ),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', which is not supported; 'silu' or 'swish'"),
        ({"hidden_size": None}, "config.json lacks hidden_size, which this family needs"),
        ({"is_causal": False}, "is_causal is False, which is not supported; True was expected"),
        # transformers makes attention bidirectional.
        ({"is_causal": None}, "is_causal is None, which is not supported; True was expected"),
        (
            {"is_causal": False, "hidden_act": "relu", "per_layer_config": {"0": {}}},
            "hidden_act is 'relu', which is not supported; 'silu' or 'swish' was expected; "
            "is_causal is False, which is not supported; True was expected; per_layer_config is",
        ),
        (
            {"is_causal": False, "hidden_act": "relu"},
            "`ignore_keys=hidden_act,is_causal` says so",
        ),
        (
            {
                "partial_rotary_factor": 0.5,
                "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
            },
            "partial_rotary_factor is 0.5, but this family rotates whole heads",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            },
            "rope_scaling replaces rope_parameters, whose rope_theta of 500000.0 would",
        ),
        ({"rope_scaling": {"type": "linear"}}, "the rope_type 'linear' needs factor"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0}},
            "the rope_type 'llama3' needs low_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 0.0}},
            "attention_factor is 0.0; a number above 0 was expected",
        ),
        ({"rope_theta": None}, "config.json lacks rope_theta"),
        (
            {"model_type": "mistral", "sliding_window": 1},
            "sliding_window is 1; a whole number, 2 or more, was expected",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0; a whole number, 2"),
        ({"model_type": "gemma2", "sliding_window": 1}, "sliding_window is 1; a whole number, 2"),
        (
            {"model_type": "gpt_oss", "sliding_window": None},
            "layer_types has 'sliding_attention', but there is no window",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "linear", "factor": 2}},
            "rope_parameters has factor, rope_type; only 'full_attention' and",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has 'sliding_attention', but there is no window",
        ),
        (
            {"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8},
            "num_experts is 4 and num_local_experts is 8, but they are two names of one setting",
        ),
        (
            {
                "model_type": "deepseek_v3",
                "partial_rotary_factor": 0.5,
                "rope_parameters": YARN,
            },
            "partial_rotary_factor is 0.5, but this family rotates whole heads",
        ),
        *(
            ({"model_type": "glm_moe_dsa", "num_experts_per_tok": 2, **values}, message)
            for values, message in (
                ({"indexer_types": ["shared", "full"]}, "are ['shared', 'full']; 2 of 'full' and"),
                (
                    {"indexer_types": ["full", "half"]},
                    "indexers of the layers are ['full', ",
                ),
                ({"index_topk_pattern": "F"}, "indexers of the layers are ['full']; 2 of 'full'"),
                (
                    {"mlp_layer_types": ["sparse", "dense"]},
                    "mlp_layer_types is ['sparse', ",
                ),
                ({"layer_types": ["full_attention"] * 2}, "layer_types is ['full_attention', "),
            )
        ),
        (
            {"model_type": "ministral3", "rope_parameters": YARN},
            "llama_4_scaling_beta of the rotary parameters is None and original_max_position",
        ),
        (
            {
                "model_type": "ministral3",
                "rope_parameters": {"rope_theta": 100.0, "llama_4_scaling_beta": 0.1},
            },
            "original_max_position_embeddings is None; a number, 0 or more, and a number of",
        ),
        (
            {
                "model_type": "mistral4",
                **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "num_experts_per_tok": 2},
                "rope_parameters": YARN
                | {"partial_rotary_factor": 0.5, "llama_4_scaling_beta": 0.0},
            },
            "partial_rotary_factor is 0.5; 0.25 was expected, as qk_rope_head_dim=2 and qk_nope",
        ),
        (
            {"model_type": "youtu", "qk_nope_head_dim": 6, "qk_rope_head_dim": 2},
            "head_dim is 4, which is not supported; 2 was expected",
        ),
        (
            {"model_type": "t5", "num_hidden_layers": 2},
            "has num_hidden_layers without num_layers",
        ),
        (
            {"model_type": "t5", "num_hidden_layers": 6, "num_layers": 6, "dense_act_fn": "silu"},
            "dense_act_fn is 'silu', which is not supported; 'relu' was expected",
        ),
        ({"rope_scaling": {"type": "yarm"}}, "the rope_type 'yarm' is unknown. Did you mean 'yarn"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "attn_factor": 1.0}},
            "the rotary parameters attn_factor are unknown for the rope_type 'linear'",
        ),
    ],
)
def test_what_is_not_supported_is_refused(values, message):
    with pytest.raises(ValueError) as error:
        experiment_of(config(**values))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "given"),
    [
        # As dumps of old versions and unsloth have them.
        ("llama", {"max_length": 20, "top_k": 50, "pruned_heads": {}, "is_llama_config": True}),
        ("llama", {"rope_interleaved": False, "internal_version": "1", "unknown": None}),
        ("llama", {"use_rope": False, "residual_scale": 2.0, "logit_scale": 0}),
        ("llama", {"hidden_act": "swish", "per_layer_config": {}, "attention_bias": None}),
        ("llama", {"partial_rotary_factor": 0.5, "sliding_window": 2, "no_rope_layers": []}),
        ("mistral", {"attention_bias": True, "mlp_bias": True, "resid_pdrop": 0.5}),
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
        (
            "hunyuan_v1_dense",
            {"im_start_id": 5, "pad_id": 7, "pool_type": "last", "use_cla": False},
        ),
        ("qwen3_moe", {"use_qk_norm": True, "qkv_bias": False, "max_window_layers": 2}),
        ("qwen3", {"sliding_window": 4, "max_window_layers": 1}),
        ("gemma3_text", {"attn_logit_softcapping": 5.0, "_sliding_window_pattern": 3}),
        ("qwen3_5_text", {"output_gate_type": "swish"}),
    ],
)
def test_what_the_class_ignores_is_ignored(model_type, given):
    needed = {"qwen3_5_text": {"linear_num_value_heads": 32, "head_dim": 8}}.get(model_type, {})
    plain = config(model_type=model_type, **needed)
    assert experiment_of(config(model_type=model_type, **needed, **given)) == experiment_of(plain)


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("deepseek_v3", {"n_group": 4, "topk_group": 0}, "topk_group is 0; a whole number, 1 or"),
        ("dots1", {"topk_group": 0}, "topk_group is 0; a whole number, 1 or more, was expected"),
        (
            "glm4_moe",
            {"n_group": 8, "topk_group": 1},
            "topk_group is 1 with n_group=8, which is not supported; 3",
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1},
            "topk_group is 1 with n_group=4, which is not supported; 2 was expected",
        ),
        ("dots1", {"n_group": 4}, "topk_group is 1 with n_group=4, which is not supported; 2"),
        ("vaultgemma", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0; a num"),
        ("gemma4_text", {"final_logit_softcapping": 0}, "final_logit_softcapping is 0; a number"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0; a number above 0"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0; a number above 0 was expected"),
        (
            "dots1",
            {"n_routed_experts": 9, "n_group": 4},
            "n_group is 4 with n_routed_experts=9, which",
        ),
        (
            "llama4_text",
            {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 8},
            "attn_temperature_tuning is True with layer_types of 'chunked_attention' where no_rope",
        ),
        ("ernie4_5_moe", {"moe_norm_min": 0.9}, "moe_norm_min is 0.9, which is not supported"),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "0.5, but this family rotates whole"),
        ("glm", {"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 of head_dim=16 is 3"),
        ("minimax_m2", {"head_dim": 6}, "partial_rotary_factor=1.3"),
        ("mimo_v2_flash", {"attention_value_scale": 0.0}, "attention_value_scale is 0.0. "),
        (
            "qwen3_next",
            {"linear_key_head_dim": 4},
            "linear_key_head_dim is 4, which is not supported; 8 was expected; linear_value_head",
        ),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True with moe_num_shared_exp"),
        (
            "mt5",
            {"relative_attention_num_buckets": 9},
            "relative_attention_num_buckets is 9, which is not supported; 8 was",
        ),
        ("t5", {"num_decoder_layers": 0}, "num_decoder_layers is 0; a whole number, 1 or more"),
        ("mt5", {"is_gated_act": False}, "is_gated_act is False, which is not supported; True"),
        ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported"),
        (
            "kimi_linear",
            {"linear_attn_config": {"head_dim": 0}},
            "linear_attn_config: head_dim is 0; a whole number, 1 or more, was expected",
        ),
        (
            "kimi_linear",
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3, 4, 6]},
            },
            "have the numbers [2, 1, 3, 4, 6]; each number from 1 to num_hidden_layers=5",
        ),
        ("kimi_linear", {"num_experts": 4}, "num_experts is 4 and num_local_experts is 8, but"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(model_type, values, message):
    case = next(case for case in CASES if case.model_type == model_type)
    with pytest.raises(UserError) as error:
        experiment_of(PublishedConfig(case_config(case).values | values, "c"))
    assert message in str(error.value)


_OTHER_SCALINGS = {"factor": 2.0, "beta_fast": 8.0, "mscale": 0.5, "attention_factor": 0.5}


@pytest.mark.parametrize(
    ("model_type", "ignored"),
    [
        # Parameters of each type of layer name their own lengths.
        ("mellum", {"original_max_position_embeddings": 64}),
        ("gemma3_text", {"original_max_position_embeddings": 64}),
        ("ernie4_5_moe", {"moe_norm_min": 1e-15}),
        ("deepseek_v2", {"n_group": 3, "topk_group": 5}),
        ("gemma4_text", {"moe_intermediate_size": 24, "num_experts": 8, "top_k_experts": 3}),
        ("qwen2", {"sliding_window": 0, "max_window_layers": 0}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 0]}),
        ("switch_transformers", {"add_router_probs": True}),
        # The router has two choices, whatever the key says.
        ("phimoe", {"num_experts_per_tok": 4}),
        ("llama", {"rope_parameters": {"rope_theta": 10000.0, **_OTHER_SCALINGS}}),
        # As in the published file.
        ("kimi_linear", {"head_dim": 72, "mla_use_nope": True, "rope_theta": 5.0}),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 3, 4, 5]}},
        ),
    ],
)
def test_what_has_no_meaning_beside_other_keys_is_ignored(model_type, ignored):
    case = next(case for case in CASES if case.model_type == model_type)
    plain = case_config(case).values
    expected = experiment_of(PublishedConfig(plain, "c"))
    assert experiment_of(PublishedConfig(plain | ignored, "c")) == expected


@pytest.mark.parametrize(
    ("model_type", "values", "windows"),
    [
        ("qwen2", {"max_window_layers": 2}, [0, 0, 5, 5]),
        ("qwen2_moe", {"max_window_layers": 3}, [5, 0, 5, 0]),
        ("qwen3", {"layer_types": ["sliding_attention"] + ["full_attention"] * 3}, [5, 0, 0, 0]),
        ("qwen3_moe", {"max_window_layers": 2, "layer_types": ["full_attention"] * 4}, [5] * 4),
    ],
)
def test_windows_of_qwen(model_type, values, windows):
    case = next(case for case in CASES if case.model_type == model_type)
    values = {"num_hidden_layers": 4, "sliding_window": 6, "use_sliding_window": True} | values
    found = experiment_of(PublishedConfig(case_config(case).values | values, "c")).task.decoder
    assert [each.window for each in attention_of_layers(found)] == windows


def test_a_share_of_a_head_is_rounded_down():
    case = next(case for case in CASES if case.model_type == "glm")
    values = case_config(case).values | {"partial_rotary_factor": 0.3}
    attention = experiment_of(PublishedConfig(values, "c")).task.decoder.layer.self_attention
    assert attention.head_dim * attention.rotary_fraction == 4


def test_a_null_share_of_minimax_m2_is_the_whole_head():
    case = next(case for case in CASES if case.model_type == "minimax_m2")
    shares = [
        experiment_of(
            PublishedConfig(case_config(case).values | given, "c")
        ).task.decoder.layer.self_attention.rotary_fraction
        for given in ({}, {"partial_rotary_factor": None})
    ]
    assert shares == [0.5, 1.0]


def test_null_sizes_of_layers_of_gemma_4_are_the_sizes_of_all():
    case = next(case for case in CASES if case.model_type == "gemma4_text")
    values = case_config(case).values | {"per_layer_config": None}
    found = experiment_of(PublishedConfig(values, "c")).task.decoder.attention_pattern
    assert {(each.head_dim, each.num_key_value_heads) for each in found} == {(16, 2)}


def test_an_mt5_may_have_no_gates():
    case = next(case for case in CASES if case.model_type == "mt5")
    values = case_config(case).values | {"feed_forward_proj": "relu"}
    layer = experiment_of(PublishedConfig(values, "c")).task.decoder.layer
    assert layer.feed_forward.activation == "relu"


# Their classes rotate whole heads, whatever the key says.
WHOLE = """afmoe cohere cohere2 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma2
    granite granitemoe granitemoeshared helium hunyuan_v1_dense hy_v3 internlm3 iquestcoder llama
    llama4_text ministral mistral mixtral olmo2 olmoe phimoe qwen2 qwen2_moe qwen3 qwen3_moe
    seed_oss smollm3 vaultgemma""".split()


@pytest.mark.parametrize("model_type", WHOLE)
def test_whole_heads_rotate_whatever_a_key_says_that_the_class_ignores(model_type):
    case = next(case for case in CASES if case.model_type == model_type)
    values = {**case_config(case).values, "rope_parameters": {"rope_theta": 50.0}}
    expected = experiment_of(PublishedConfig(values, "c"))
    share = {"partial_rotary_factor": 0.5}
    for given in (share, {"rope_parameters": {"rope_theta": 50.0, **share}}):
        assert experiment_of(PublishedConfig(values | given, "c")) == expected


def test_named_keys_are_ignored():
    values = CONFIG | {"hidden_act": "relu", "is_causal": False}
    known = PublishedConfig(values, "config.json", ["hidden_act", "is_causal"])
    assert experiment_of(known) == experiment_of(config())
    with pytest.raises(ValueError, match="config.json: is_causal is False, which"):
        experiment_of(PublishedConfig(values, "config.json", ["hidden_act"]))


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("mixtral", "num_experts_per_tok"),
        ("granitemoe", "num_experts_per_tok"),
        ("minimax_m2", "num_experts_per_tok"),
        ("hunyuan_v1_moe", "moe_topk"),
    ],
)
def test_a_token_may_have_one_expert(model_type, key):
    case = next(case for case in CASES if case.model_type == model_type)
    values = {"model_type": model_type, **case.values, key: 1}
    task = experiment_of(PublishedConfig(values, "config.json")).task.instantiate()
    assert task.p.decoder.moe.router.k == 1


def test_the_length_of_dynamic_scaling_is_the_number_of_positions():
    rope = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}
    task = experiment_of(config(rope_scaling=rope), length=64).task
    assert task.decoder.layer.self_attention.rotary_scaling.original_length == 32


def test_yarn_allows_texts_as_long_as_its_factor_says():
    """A user of Qwen2.5 adds the scaling and leaves max_position_embeddings as it is."""
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert experiment_of(config(rope_scaling=rope), length=128).input.length == 128
    with pytest.raises(ValueError, match="`length=129` is more than the 128 positions"):
        experiment_of(config(rope_scaling=rope), length=129)
    # Of a model that was trained with the scaling, the number is that after it.
    trained = config(rope_scaling=rope, max_position_embeddings=128)
    with pytest.raises(ValueError, match="`length=129` is more than the 128 positions"):
        experiment_of(trained, length=129)


def test_kimi_k2_is_a_deepseek_v3():
    values = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    values |= {"first_k_dense_replace": 1, "head_dim": None}
    kimi, deepseek = (config(model_type=m, **values) for m in ("kimi_k2", "deepseek_v3"))
    assert experiment_of(kimi).task == experiment_of(deepseek).task


def test_two_names_of_a_setting_may_both_be_off():
    case = next(case for case in CASES if case.model_type == "kimi_linear")
    values = case_config(case).values | {"norm_topk_prob": False, "moe_renormalize": None}
    found = experiment_of(PublishedConfig(values, "c"))
    assert not found.task.decoder.moe.router.normalize


def test_kimi_linear_takes_older_keys_first_and_types_of_layers_last():
    case = next(case for case in CASES if case.model_type == "kimi_linear")
    older = {"num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 3}
    older |= {"full_attn_layers": [2, 4], "kda_layers": [1, 3, 5]}
    values = {**case_config(case).values, "linear_attn_config": older, "layer_types": None}
    decoder = experiment_of(PublishedConfig(values, "c")).task.decoder
    layers = attention_of_layers(decoder)
    assert ["rotates" in each for each in layers] == [False, True] * 2 + [False]
    assert not layers[1].rotates and decoder.dense_first == 1
    kimi = layers[0]
    assert (kimi.num_heads, kimi.head_dim, kimi.convolution_width) == (2, 4, 3)


def test_mimo_is_a_qwen2():
    values = {"attention_bias": True, "num_nextn_predict_layers": 1}
    mimo, qwen2 = config(model_type="mimo", **values), config(model_type="qwen2")
    assert experiment_of(mimo).task == experiment_of(qwen2).task
    assert FAMILIES["mimo"].left_out(mimo) == ("model.mtp_layers.",)


def test_ministral_3_without_growth_is_a_mistral():
    """Devstral 2 has the parameter and no growth."""
    rope = YARN | {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 16}
    found = experiment_of(config(model_type="ministral3", rope_parameters=dict(rope)))
    del rope["llama_4_scaling_beta"]
    plain = {"sliding_window": None, "rope_parameters": rope}
    assert found.task == experiment_of(config(model_type="mistral", **plain)).task


def test_glm_5_takes_the_types_of_its_layers_before_their_number():
    values = {"model_type": "glm_moe_dsa", "num_experts_per_tok": 2, "first_k_dense_replace": 2}
    found = experiment_of(config(mlp_layer_types=["dense", "sparse"], **values)).task
    assert found.decoder.dense_first == 1


def test_mimo_v2_flash_takes_both_windows_of_published_files():
    """transformers reads the first one, which does not count the position itself."""
    case = next(case for case in CASES if case.model_type == "mimo_v2_flash")
    values = {**case_config(case).values, "sliding_window_size": 5, "sliding_window": 5}
    found = experiment_of(PublishedConfig(values, "c")).task.decoder.attention_pattern
    assert {each.window for each in found} == {0, 5}


def test_hy3_takes_the_types_of_its_layers():
    values = {"model_type": "hy_v3", "num_experts_per_tok": 2}
    plain, sparse = (config(**values, **more) for more in ({}, {"mlp_layer_types": ["sparse"] * 2}))
    longer = config(**values, mlp_layer_types=["dense", "sparse", "dense"])
    found = [experiment_of(each).task.decoder.dense_first for each in (plain, sparse, longer)]
    assert found == [1, 0, 1]


def test_llama_4_has_chunks_where_it_rotates():
    values = {"model_type": "llama4_text", "intermediate_size_mlp": 12, "num_local_experts": 2}
    values |= {"max_position_embeddings": 512, "attention_chunk_size": 64}
    found = experiment_of(config(num_hidden_layers=4, **values), length=512).task.decoder
    assert [each.chunk for each in found.attention_pattern] == [64, 64, 64, 0]
    assert [each.temperature_floor for each in found.attention_pattern] == [0, 0, 0, 8192]
    types = ["chunked_attention"] * 4
    one_chunk = config(
        num_hidden_layers=4, layer_types=types, **values | {"attention_chunk_size": 512}
    )
    assert experiment_of(one_chunk, length=512).task.decoder.attention_pattern[-1].chunk == 0
    with pytest.raises(ValueError, match=r"moe_layers is \[1\], which is not supported; \[0, 1\]"):
        experiment_of(config(moe_layers=[1], **values))


def test_what_layers_of_hunyuan_have_in_common():
    values = {"model_type": "hunyuan_v1_moe", "num_experts": 4}
    one, each = config(moe_topk=2, **values), config(moe_topk=[2, 2], **values)
    assert experiment_of(one).task == experiment_of(each).task
    with pytest.raises(ValueError, match=r"moe_topk is \[2, 3\]; one whole number for all layers"):
        experiment_of(config(moe_topk=[2, 3], **values))


def test_clipped_queries_are_refused():
    case = next(case for case in CASES if case.model_type == "olmoe")
    values = {"model_type": "olmoe", "rms_norm_eps": 1e-5, **case.values, "clip_qkv": 8.0}
    with pytest.raises(ValueError, match=r"clip_qkv is 8\.0, which is not supported"):
        experiment_of(PublishedConfig(values, "config.json"))


def test_layers_that_predict_further_tokens_are_left_out():
    values = {"num_hidden_layers": 4, "num_nextn_predict_layers": 2}
    found = extra_layers(PublishedConfig(values, "config.json"))
    assert found == ("model.layers.4.", "model.layers.5.")


def test_a_length_beyond_the_models_is_refused():
    with pytest.raises(ValueError, match="`length=33` is more than the 32 positions"):
        experiment_of(config(), length=33)


def test_files_that_are_no_config_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: there is no such file"):
        PublishedConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"no such file\. Did you mean '.*/config\.json'\?"):
        PublishedConfig.load(tmp_path / "confg.json")
    with pytest.raises(ValueError, match="holds a list; a JSON object was expected"):
        PublishedConfig.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG)[:-5])
    with pytest.raises(ValueError, match="is no JSON"):
        PublishedConfig.load(tmp_path)
