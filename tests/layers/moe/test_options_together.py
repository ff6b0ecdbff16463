# tests: layers/moe/layer.py
"""Tests that incompatible options of the layer, router and dispatch are rejected."""

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.moe import MixtureOfExperts, TopKRouter
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.published_layers.routers import (
    ExpertChoiceRouter,
    HashRouter,
    SigmoidRouter,
    SinkhornRouter,
)


def layer_params(router=None, **values):
    params = MixtureOfExperts.params().set(model_dim=4, hidden_dim=4, num_experts=4, **values)
    return params.set(router=router) if router else params


class OptionsTogetherTest(testing.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        (
            "expert_choice_in_a_causal_layer",
            layer_params(ExpertChoiceRouter.params(), is_causal=True),
            ("router", "is_causal"),
        ),
        (
            "sinkhorn_in_a_causal_layer",
            layer_params(SinkhornRouter.params(), is_causal=True),
            ("router", "is_causal"),
        ),
        (
            "priority_by_gate_in_a_causal_layer",
            layer_params(TopKRouter.params().set(priority="gate"), is_causal=True),
            ("router.priority", "is_causal"),
        ),
        (
            "hash_without_token_ids",
            layer_params(HashRouter.params()),
            ("router", "has_token_ids"),
        ),
        (
            "capacity_of_a_dropless_layer",
            layer_params(
                TopKRouter.params().set(capacity_factor=2.0), dispatch=DroplessDispatch.params()
            ),
            ("router.capacity_factor", "dropless"),
        ),
        (
            "expert_choice_in_a_dropless_layer",
            layer_params(ExpertChoiceRouter.params(), dispatch=DroplessDispatch.params()),
            ("router", "dropless"),
        ),
        (
            "more_experts_per_token_than_experts",
            layer_params(TopKRouter.params().set(k=5)),
            ("router.k", "router.num_experts"),
        ),
        (
            "expert_groups_of_unequal_sizes",
            layer_params(SigmoidRouter.params().set(expert_groups=3, groups_per_token=1)),
            ("router.expert_groups", "router.num_experts"),
        ),
    )
    def test_errors_name_both_options(self, params, names):
        with self.assertRaises(ValueError) as raised:
            params.instantiate(path="moe")
        for name in names:
            self.assertIn(name, str(raised.exception))

    def test_explicit_opt_in_is_accepted(self):
        router = ExpertChoiceRouter.params().set(allow_causal=True)
        layer = layer_params(router, is_causal=True).instantiate(path="moe")
        self.assertIsInstance(layer, MixtureOfExperts)

    @parameterized.parameters(
        (ExpertChoiceRouter, False, False, True),
        (ExpertChoiceRouter, True, False, False),
        (HashRouter, True, True, True),
        (HashRouter, True, False, False),
    )
    def test_a_stack_tells_its_mixtures_their_context(
        self, router, is_decoder, has_token_ids, fits
    ):
        stack = TransformerStack.params().set(
            num_layers=2, model_dim=4, num_heads=1, hidden_dim=4, is_decoder=is_decoder
        )
        stack.set(has_token_ids=has_token_ids)
        stack.moe.set(num_experts=4, router=router.params())
        if fits:
            self.assertIsInstance(stack.instantiate(path="stack"), TransformerStack)
            return
        with self.assertRaisesRegex(ValueError, r"stack.layers\[1\].feed_forward"):
            stack.instantiate(path="stack")


if __name__ == "__main__":
    testing.main()
