"""Finds layers and phases in the names that TensorFlow and XLA give operations."""

import pytest

from lingvo_gshard.wings.hlo.names import (
    is_dispatch,
    is_uninformative,
    layer_and_phase,
    operation_name,
)

LAYERS = frozenset(
    [
        "encoder",
        "encoder/layers_0",
        "encoder/layers_0/feed_forward",
        "encoder/layers/body_1/feed_forward",
        "softmax",
    ]
)
FEED_FORWARD = "encoder/layers_0/feed_forward"


@pytest.mark.parametrize(
    ("name", "layer", "phase"),
    [
        (f"{FEED_FORWARD}/einsum/Einsum", FEED_FORWARD, "forward"),
        (f"{FEED_FORWARD}/einsum_1/Einsum", FEED_FORWARD, "forward"),
        ("encoder/layers_0/add", "encoder/layers_0", "forward"),
        ("encoder/layers_01/add", "encoder", "forward"),
        (f"gradient_tape/{FEED_FORWARD}/MatMul_1", FEED_FORWARD, "backward"),
        (f"rematerialized/{FEED_FORWARD}/einsum/Einsum", FEED_FORWARD, "rematerialized"),
        (f"gradient_tape/rematerialized/{FEED_FORWARD}/x", FEED_FORWARD, "backward"),
        (f"rematerialized/gradient_tape/{FEED_FORWARD}/MatMul", FEED_FORWARD, "backward"),
        (
            "while/body/_123/encoder/layers/body_1/feed_forward/einsum/Einsum",
            "encoder/layers/body_1/feed_forward",
            "forward",
        ),
        (
            "gradient_tape/while/gradients/encoder/layers/body_1/feed_forward/Relu_grad/ReluGrad",
            "encoder/layers/body_1/feed_forward",
            "backward",
        ),
        (f"optimizer/{FEED_FORWARD}/w_in/mul", FEED_FORWARD, "optimizer"),
        ("optimizer/embedding/mul", "", "optimizer"),
        ("add_3", "", "other"),
        ("", "", "other"),
    ],
)
def test_layer_and_phase(name, layer, phase):
    assert layer_and_phase(name, LAYERS) == (layer, phase)


@pytest.mark.parametrize(
    ("name", "layer", "phase"),
    [
        (f"{FEED_FORWARD}/einsum_1/Einsum", FEED_FORWARD, "forward"),
        (f"{FEED_FORWARD}/Relu", FEED_FORWARD, "forward"),
        (f"gradient_tape/{FEED_FORWARD}/einsum/Einsum", FEED_FORWARD, "backward"),
        ("gradient_tape/while/gradients/moe/transpose_grad/transpose", "moe", "backward"),
        ("while/body/_12/moe/MatMul", "moe", "forward"),
        ("while/TensorListPushBack", "", "other"),
        ("args[4]", "", "other"),
    ],
)
def test_layers_are_inferred_without_a_list_of_layers(name, layer, phase):
    assert layer_and_phase(name) == (layer, phase)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("jit(call)/call_exported/moe/einsum/Einsum", "moe/einsum/Einsum"),
        ("jit(call)/jit(main)/moe/add", "moe/add"),
        ("jit(call)/call_exported", ""),
        ("moe/add", "moe/add"),
        ("jit(call)/call_exported/gradient_tape/ff/(add/Sum:MatMul)", "gradient_tape/ff/add/Sum"),
        ("jit(call)/call_exported/gradient_tape/(ff/MatMul:b)", "gradient_tape/ff/MatMul"),
        ("jit(call)/call_exported/a/Reshape;b/c", "a/Reshape"),
    ],
)
def test_wrapped_and_merged_names_are_cleaned(text, name):
    assert operation_name(text) == name


def test_dispatch_and_combine_have_name_scopes():
    assert is_dispatch("moe/dispatch/einsum/Einsum")
    assert is_dispatch("gradient_tape/encoder/layers_1/moe/combine_1/MatMul")
    assert not is_dispatch("moe/einsum/Einsum")
    assert not is_dispatch("moe/dispatch")


def test_uninformative_names():
    for name in ("", "while", "while/TensorListPushBack_3", "args[2]", "gradient_tape/while/AddN"):
        assert is_uninformative(name)
    assert not is_uninformative("while/moe/AddN")
    assert not is_uninformative("add_3")
