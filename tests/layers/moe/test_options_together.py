"""Tests that incompatible options of the layer, router and dispatch are rejected."""

import pytest

from lingvo_gshard.layers.moe import (
    DroplessDispatch,
    ExpertChoiceRouter,
    HashRouter,
    MixtureOfExperts,
    SigmoidRouter,
    SinkhornRouter,
    TopKRouter,
)
from lingvo_gshard.layers.stacks.transformer import TransformerStack


def layer_params(router=None, **values):
    params = MixtureOfExperts.params().set(model_dim=4, hidden_dim=4, num_experts=4, **values)
    return params.set(router=router) if router else params


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (layer_params(ExpertChoiceRouter.params(), is_causal=True), ("router", "is_causal")),
        (layer_params(SinkhornRouter.params(), is_causal=True), ("router", "is_causal")),
        (
            layer_params(TopKRouter.params().set(priority="gate"), is_causal=True),
            ("router.priority", "is_causal"),
        ),
        (layer_params(HashRouter.params()), ("router", "has_token_ids")),
        (
            layer_params(
                TopKRouter.params().set(capacity_factor=2.0), dispatch=DroplessDispatch.params()
            ),
            ("router.capacity_factor", "dropless"),
        ),
        (
            layer_params(ExpertChoiceRouter.params(), dispatch=DroplessDispatch.params()),
            ("router", "dropless"),
        ),
        (layer_params(TopKRouter.params().set(k=5)), ("router.k", "router.num_experts")),
        (
            layer_params(SigmoidRouter.params().set(expert_groups=3, groups_per_token=1)),
            ("router.expert_groups", "router.num_experts"),
        ),
    ],
)
def test_errors_name_both_options(params, names):
    with pytest.raises(ValueError) as raised:
        params.instantiate(path="moe")
    for name in names:
        assert name in str(raised.value)


def test_explicit_opt_in_is_accepted():
    router = ExpertChoiceRouter.params().set(allow_causal=True)
    assert layer_params(router, is_causal=True).instantiate(path="moe")


@pytest.mark.parametrize(
    ("router", "is_decoder", "has_token_ids", "fits"),
    [
        (ExpertChoiceRouter, False, False, True),
        (ExpertChoiceRouter, True, False, False),
        (HashRouter, True, True, True),
        (HashRouter, True, False, False),
    ],
)
def test_a_stack_tells_its_mixtures_their_context(router, is_decoder, has_token_ids, fits):
    stack = TransformerStack.params().set(
        num_layers=2, model_dim=4, num_heads=1, hidden_dim=4, is_decoder=is_decoder
    )
    stack.set(has_token_ids=has_token_ids)
    stack.moe.set(num_experts=4, router=router.params())
    if fits:
        assert stack.instantiate(path="stack")
        return
    with pytest.raises(ValueError, match=r"stack.layers\[1\].feed_forward"):
        stack.instantiate(path="stack")
