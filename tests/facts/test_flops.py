# tests: wings/facts/flops.py, core/flops.py, tasks/translation.py, wings/facts/parameters.py
# tests: wings/facts/step.py
"""Compares FLOP counts with counts by hand and with compiled programs; tests active weights."""

import dataclasses
import math
import re

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.layers import SelfAttention
from lingvo_gshard.layers.moe import TopKRouter
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.facts.flops import flops, visible_pairs
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.facts.step import FORWARD_AND_BACKWARD
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention
from tests.layers.stacks.executions import loop, sequential

B, L, K = 2, 4, 8
M, H, N, E, V = 8, 12, 2, 4, 16

# The gradient of a norm has two products of [tokens, M] with a vector. FLOP counts exclude them:
# the norms of two layers and the final norm, in the encoder and in the decoder.
NORMS = 2 * 2 * M * B * ((2 * 2 + 1) * L + (2 * 3 + 1) * K)
# Einsums compute the later keys of the two layers of the decoder, which its mask hides.
HIDDEN = FORWARD_AND_BACKWARD * 2 * 2 * 2 * B * (K * (K - 1) // 2) * M


def stack_params(moe_every: int, **values):
    stack = TransformerStack.params().set(
        num_layers=2, num_heads=N, hidden_dim=H, moe_every=moe_every, **values
    )
    stack.moe.set(num_experts=E, group_size=8)
    return stack


def task_of(moe_every: int, head_dim: int = 0) -> TranslationTask:
    params = TranslationTask.params().set(
        source_vocabulary_size=V, target_vocabulary_size=V, model_dim=M
    )
    params.set(encoder=stack_params(moe_every), decoder=stack_params(moe_every, is_decoder=True))
    for stack in (params.encoder, params.decoder):
        stack.layer.self_attention.head_dim = head_dim
        stack.layer.cross_attention.head_dim = head_dim
    return params.instantiate()


def flops_of_step(task: TranslationTask) -> int:
    return FORWARD_AND_BACKWARD * flops(task, TokenShape(B, K, memory_length=L))


def stack_step(stack) -> int:
    return FORWARD_AND_BACKWARD * flops(stack.instantiate(), TokenShape(16, 256))


def products_in_step(task: TranslationTask) -> int:
    """Returns the FLOPs of all dots in the HLO of a training step."""
    trainer = Trainer(Trainer.params(), task)
    batch = {
        f"{side}_{part}": np.ones((B, length), np.int32)
        for side, length, ids in (("source", L, ["ids"]), ("target", K, ["inputs", "labels"]))
        for part in (*ids, "segments", "positions")
    }

    @tf.function(jit_compile=True, autograph=False)
    def step(theta):
        return trainer.gradients(theta, batch, tf.constant([1, 2]))[2]

    hlo = step.experimental_get_compiler_ir(task.init(1))(stage="hlo")
    shapes = dict(re.findall(r"(\S+) = \w+\[([\d,]*)\]", hlo))
    total = 0
    result, left_operand = r"= \w+\[([\d,]*)\]\S* dot", r"\((?:\w+\[[\d,]*\]\S* )?(\S+?), "
    dot = result + left_operand + r".*lhs_contracting_dims={([\d,]*)}"
    for output, left, contracted in re.findall(dot, hlo):
        sizes = _sizes(shapes[left])
        total += 2 * math.prod(_sizes(output)) * math.prod(sizes[i] for i in _sizes(contracted))
    return total


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def task_of_four_layers(repeat: bool) -> TranslationTask:
    params = task_of(moe_every=2).p.copy()
    for stack in (params.encoder, params.decoder):
        stack.set(num_layers=4, execution=loop() if repeat else sequential())
    return params.instantiate()


class FlopsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(0, 3)
    def test_flops_of_a_dense_step_equal_those_of_its_dots(self, head_dim):
        task = task_of(moe_every=0, head_dim=head_dim)
        hidden = HIDDEN * (head_dim * N or M) // M
        self.assertEqual(flops_of_step(task) + NORMS + hidden, products_in_step(task))

    def test_flops_of_a_mixture_equal_those_of_its_dots_if_all_slots_are_filled(self):
        """Gives each expert 2S/E capacity slots: exactly the two choices of every token."""
        task = task_of(moe_every=2)
        counted = flops_of_step(task) + NORMS + HIDDEN
        self.assertEqual(counted, products_in_step(task))

    def test_flops_match_the_count_by_hand(self):
        """Counts two layers with M=512 and H=2048, on 4096 tokens in 16 rows of 256."""
        stack = TransformerStack.params().set(
            num_layers=2, model_dim=512, num_heads=8, hidden_dim=2048, moe_every=0
        )
        projections = 2 * 4096 * 4 * 512 * 512
        scores = 2 * 2 * 16 * 256 * 256 * 512
        dense = 2 * 4096 * 2 * 512 * 2048
        expected = 3 * 2 * (projections + scores + dense)
        self.assertEqual(stack_step(stack), expected)
        self.assertEqual(expected, 167_503_724_544)
        stack.moe_every = 2
        stack.moe.num_experts = 8
        with_experts = stack_step(stack)
        self.assertEqual(with_experts, expected + 3 * (dense + 2 * 4096 * 512 * 8))

    def test_gates_shared_experts_and_experts_per_token_are_counted(self):
        """Counts what options add to a mixture layer on 4096 tokens, forward and backward."""
        stack = TransformerStack.params().set(
            num_layers=1, model_dim=512, num_heads=8, hidden_dim=2048, moe_every=1
        )
        stack.moe.num_experts = 8

        def step() -> int:
            return stack_step(stack)

        product, before = 2 * 4096 * 512 * 2048, step()
        stack.moe.experts.activation = "swiglu"
        self.assertEqual(step(), before + 3 * 2 * product)
        stack.moe.router = TopKRouter.params().set(k=4)
        self.assertEqual(step(), before + 3 * (4 * 3 - 2 * 2) * product)
        stack.moe.shared_hidden_dim = 1024
        self.assertEqual(step(), before + 3 * (4 * 3 - 2 * 2) * product + 3 * 3 * product // 2)

    def test_a_loop_counts_every_iteration(self):
        looped, layers = (task_of_four_layers(repeat) for repeat in (True, False))
        self.assertEqual(flops_of_step(looped), flops_of_step(layers))
        self.assertGreater(flops_of_step(looped), flops_of_step(task_of(2)))
        self.assertEqual(active_parameters(looped), active_parameters(layers))

    def test_grouped_query_attention_needs_fewer_flops(self):
        """Counts a layer with M=512 and 8 heads, with a fourth as many key and value heads."""
        stack = TransformerStack.params().set(
            num_layers=1, model_dim=512, num_heads=8, hidden_dim=2048, moe_every=0
        )
        before = stack_step(stack)
        stack.layer.self_attention.num_key_value_heads = 2
        saved = 3 * 2 * (2 * 4096 * 512 * 512) * 3 // 4
        self.assertEqual(stack_step(stack), before - saved)

    @parameterized.parameters(
        ({}, lambda query, key: True),
        ({"is_causal": True}, lambda query, key: key <= query),
        ({"is_causal": True, "window": 3}, lambda query, key: 0 <= query - key <= 3),
        ({"window": 2}, lambda query, key: abs(query - key) <= 2),
        ({"is_causal": True, "window": 99}, lambda query, key: key <= query),
        (
            {"is_causal": True, "chunk": 4},
            lambda query, key: key <= query and query // 4 == key // 4,
        ),
    )
    def test_attention_counts_the_pairs_that_positions_allow(self, options, is_visible):
        length = 11
        cls = PublishedAttention if "chunk" in options else SelfAttention
        layer = cls.params().set(model_dim=M, num_heads=N, **options).instantiate()
        pairs = sum(is_visible(i, j) for i in range(length) for j in range(length))
        self.assertEqual(visible_pairs(layer, TokenShape(3, length)), pairs)
        shape = TokenShape(3, length)
        weights = flops(layer, dataclasses.replace(shape, has_pairs=False))
        self.assertEqual(flops(layer, shape), weights + 2 * 2 * 3 * pairs * M)


class ActiveParametersTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_active_parameters_include_two_experts_and_all_other_weights(self, repeat):
        """Counts norms, projections, routers, embeddings, and feed-forward layers with biases."""
        norm, projections = 2 * M, 4 * M * M
        dense = M * H + H + H * M + M
        mixture = M * E + 2 * (M * H + H * M)
        encoder = 2 * (2 * (2 * norm + projections) + dense + mixture) + norm
        decoder = 2 * (2 * (3 * norm + 2 * projections) + dense + mixture) + norm
        active = encoder + decoder + 2 * V * M
        task = task_of_four_layers(repeat)
        self.assertEqual(active_parameters(task), active)
        total = sum(math.prod(spec.shape) for spec in task.variable_specs().flatten())
        self.assertEqual(total, active + 4 * (E - 2) * 2 * M * H)

    def test_all_parameters_of_a_dense_model_are_active(self):
        task = task_of(moe_every=0)
        total = sum(math.prod(spec.shape) for spec in task.variable_specs().flatten())
        self.assertEqual(active_parameters(task), total)


if __name__ == "__main__":
    testing.main()
