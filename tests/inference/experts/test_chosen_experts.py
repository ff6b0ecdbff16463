# tests: wings/inference/experts/chosen_experts.py, wings/inference/experts/split_experts.py
# tests: wings/inference/experts/stacked_experts.py, wings/inference/layers/moe.py
"""Compares experts in inference with a loop over tokens, on one device and on eight."""

from __future__ import annotations

import unittest.mock
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import jax
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import MixtureOfExperts, TopKRouter
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.wings.hlo.module import Computation, Instruction
from lingvo_gshard.wings.inference.decoding.precision import stored_weights
from lingvo_gshard.wings.inference.experts import split_experts, stacked_experts
from lingvo_gshard.wings.inference.experts.split_experts import SplitExperts
from lingvo_gshard.wings.inference.layers import infer
from tests.layers.moe.test_experts import away_from_zero, network

M, H, K = 16, 16, 3
ONE_DEVICE = Partitioning.make("data=1", "replicated")
# On this platform, as on TPUs and GPUs, experts are stacked however few they are.
STACKED = ONE_DEVICE.on("tpu_interpreted")


def mixture(num_experts: int, hidden_dim: int = H) -> MixtureOfExperts:
    params = MixtureOfExperts.params().set(
        model_dim=M, hidden_dim=hidden_dim, num_experts=num_experts
    )
    params.router = TopKRouter.params().set(k=K)
    params.experts.set(activation="swiglu", use_bias=True)
    return params.instantiate(path="moe")


def batch(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens [B,L,M], and a mask [B,L] whose last row has padding if it has room for it."""
    mask = np.ones((rows, length), np.int32)
    mask[-1, 1:] = 0
    tokens = np.random.default_rng(3).normal(size=(rows, length, M)).astype(np.float32)
    return tokens, mask


def looped(layer, theta, x_BLM, mask_BL) -> np.ndarray:
    """Computes the layer in float64, token by token and choice by choice."""
    w_gate = theta.router.w_gate.numpy().astype(np.float64)
    y_BLM = np.zeros(x_BLM.shape)
    for row, position in np.argwhere(mask_BL):
        x_M = x_BLM[row, position].astype(np.float64)
        gate_E = np.exp(x_M @ w_gate)
        chosen = np.argsort(-gate_E)[: layer.p.router.k]
        for e in chosen:
            gate = gate_E[e] / gate_E[chosen].sum()
            y_BLM[row, position] += gate * network(theta.experts, e, x_M[None], "swiglu")[0]
    return y_BLM


def program(layer, rows, length, partitioning=ONE_DEVICE, precision="trained") -> Program:
    """Returns the program of `decoding_weights` and `infer`."""
    specs = layer.variable_specs()

    def run(x_BLM, mask_BL, *weights):
        theta = stored_weights(layer, specs.pack(weights), precision)
        with context.scope(training=False):
            return [("y", infer(layer, theta, x_BLM, mask_BL), None)]

    arrays = [
        Array("x", (rows, length, M), "float32", ((),) * 3),
        Array("mask", (rows, length), "int32", ((),) * 2),
        *(
            Array(path, spec.shape, spec.dtype, partitioning.spec_storage_split(spec, "weights"))
            for path, spec in specs.flatten_items()
        ),
    ]
    with use_partitioning(partitioning):
        return lower("infer", run, arrays, partitioning)


def instructions(computation: Computation) -> Iterator[Instruction]:
    """Yields the instructions of a computation and of those that it calls."""
    for instruction in computation.instructions:
        yield instruction
        for called in instruction.called:
            yield from instructions(called)


class ChosenExpertsTest(testing.TestCase, parameterized.TestCase):
    def run_program(self, made, x_BLM, mask_BL, theta):
        executable = Executable(made, self.devices(made.mesh.size))
        arrays = [x_BLM, mask_BL, *(w.numpy() for w in theta.flatten())]
        placed = list(map(jax.device_put, arrays, executable.input_shardings))
        return np.asarray(executable(*placed)[0]), executable

    def check(self, num_experts, rows, length, partitioning=ONE_DEVICE, hidden_dim=H):
        """Compares the layer with the loop; returns the executable."""
        layer = mixture(num_experts, hidden_dim)
        theta = away_from_zero(layer)
        x_BLM, mask_BL = batch(rows, length)
        y_BLM, executable = self.run_program(
            program(layer, rows, length, partitioning), x_BLM, mask_BL, theta
        )
        self.assertAllClose(y_BLM, looped(layer, theta, x_BLM, mask_BL), atol=2e-5, rtol=2e-5)
        return executable

    @parameterized.parameters(
        (4, 1, 1, ONE_DEVICE),
        (4, 3, 5, ONE_DEVICE),
        (4, 3, 5, STACKED),
        (80, 1, 1, ONE_DEVICE),
        (80, 3, 5, ONE_DEVICE),
        (5, 2, 300, STACKED),
    )
    def test_every_token_is_computed_by_its_experts(self, *case):
        self.check(*case)

    @parameterized.parameters(
        (4, 1, 1, "data=1,model=1"),
        (4, 3, 5, "data=1,model=1"),
        (80, 2, 3, "data=1,model=1"),
        (80, 8, 2, "data=4,model=2"),
    )
    def test_a_gpu_computes_tokens_by_the_kernel_of_grouped_products(
        self, num_experts, rows, length, mesh
    ):
        partitioning = Partitioning.make(mesh, "expert_tensor").on("cuda_interpreted")
        with mock.patch.object(
            stacked_experts, "run_grouped", side_effect=stacked_experts.run_grouped
        ) as run:
            executable = self.check(num_experts, rows, length, partitioning, hidden_dim=32)
        run.assert_called()
        self.assertEqual({use.kernel for use in executable.program.kernels}, {"grouped products"})

    def test_devices_share_experts_and_hidden_units(self):
        partitioning = Partitioning.make("data=4,model=2", "expert_tensor")
        self.check(80, 8, 2, partitioning)

    def test_devices_with_the_same_tokens_send_a_part_of_the_columns_each(self):
        partitioning = Partitioning.make("data=4,model=2", "expert_tensor")
        whole = self.check(80, 8, 2, partitioning)
        self.enter_context(mock.patch.object(split_experts, "_DEVICES_OF_A_HOST", 4))
        parts = self.check(80, 8, 2, partitioning)

        def gathered(executable, axis):
            calls = executable.collectives()
            return sum(c.bytes for c in calls if c.kind == "all-gather" and c.axes == (axis,))

        tokens, choices = 8 * 2 * M * 4, 8 * 2 * 2 * K * 4
        self.assertEqual(gathered(whole, "data"), tokens + choices)
        self.assertEqual(gathered(parts, "data"), tokens // 2 + choices)
        # The tokens of four devices, and the results of one.
        self.assertEqual(gathered(parts, "model"), tokens + tokens // 4)

    @parameterized.parameters(
        # Experts or hidden units over devices; fewer tokens than devices.
        ("data=8", "expert", 80, 8, 1),
        ("data=8", "expert", 16, 1, 1),
        ("model=8", "tensor", 4, 2, 3),
        # Weights split by M, by experts that do not divide evenly, and not at all.
        ("data=2,fsdp=2,model=2", "fsdp_expert_tensor", 12, 8, 1),
        ("data=8", "expert", 12, 8, 1),
        ("data=8", "data", 4, 16, 1),
    )
    @pytest.mark.slow
    def test_every_strategy_computes_the_same(self, mesh, strategy, num_experts, rows, length):
        self.check(num_experts, rows, length, Partitioning.make(mesh, strategy))

    @pytest.mark.slow
    def test_axes_that_do_not_divide_hidden_units_split_experts(self):
        partitioning = Partitioning.make("model=8", "tensor")
        self.check(16, 2, 1, partitioning, hidden_dim=12)
        with use_partitioning(partitioning):
            shards = SplitExperts.for_experts(mixture(16, 12).experts)
        self.assertEqual((shards.expert_axes, shards.hidden_axes), (("model",), ()))

    def test_a_step_moves_tokens_and_no_weights(self):
        executable = self.check(16, 8, 1, Partitioning.make("data=8", "expert"))
        # Tokens and their choices are gathered. XLA for CPU scatters a sum by an all-reduce.
        self.assertCollectives(executable, expected={"all-gather": 2, "all-reduce": 1})
        moved = [call.bytes for call in executable.collectives()]
        self.assertLessEqual(max(moved), 4 * 8 * max(M, 2 * K))

    def test_no_product_reads_all_experts(self):
        module = self.check(80, 4, 1).hlo_module()
        found = [i for i in instructions(module.entry) if i.opcode == "dot"]
        largest = max(operand.shape.size for i in found for operand in i.operands)
        # Products of the router, and of one expert.
        self.assertEqual(largest, max(M * H, M * 80))
        stack = 80 * M * H
        copies = [i for i in instructions(module.entry) if i.opcode == "copy"]
        self.assertEmpty(
            [i.name for i in copies if i.shape.elements is None and i.shape.size >= stack]
        )

    def test_idle_rows_give_zeros(self):
        layer = mixture(80)
        theta = away_from_zero(layer)
        x_BLM, mask_BL = batch(1, 1)
        y_BLM, _ = self.run_program(program(layer, 1, 1), x_BLM, 0 * mask_BL, theta)
        self.assertAllEqual(y_BLM, np.zeros_like(x_BLM))

    @parameterized.parameters("int8", "int8_weights")
    @pytest.mark.slow
    def test_weights_may_be_int8(self, precision):
        layer = mixture(80)
        theta = away_from_zero(layer)
        x_BLM, mask_BL = batch(4, 2)
        smallest = "lingvo_gshard.wings.inference.stored_weights.SMALL"
        self.enter_context(unittest.mock.patch(smallest, M * H))
        partitioning = Partitioning.make("data=4,model=2", "expert_tensor")
        made = program(layer, 4, 2, partitioning, precision)
        y_BLM, _ = self.run_program(made, x_BLM, mask_BL, theta)
        expected = looped(layer, theta, x_BLM, mask_BL)
        error = np.abs(y_BLM - expected).max() / np.abs(expected).max()
        self.assertBetween(error, 1e-5, 0.03)


class StackedExpertsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters([1, 0], [5, 0], [300, 2], [1400, 1])
    def test_an_expert_computes_its_rows_in_any_number_of_blocks(self, rows, first):
        """Experts `first` to 2 have rows, and 3 means no expert."""
        rng = np.random.default_rng(rows)
        weights_EMM = rng.normal(size=(3, M, M)).astype(np.float32)
        x_TM = rng.normal(size=(rows, M)).astype(np.float32)
        expert_1T = rng.integers(first, 4, size=(1, rows)).astype(np.int32)

        @tf.function(jit_compile=True)
        def run():
            weights = NestedMap(w=tf.constant(weights_EMM))
            network = lambda own, x_CM: tf.matmul(x_CM, own.w)  # noqa: E731
            return stacked_experts.run(network, weights, tf.constant(x_TM), tf.constant(expert_1T))

        y_TM, has_expert = run()[0].numpy(), expert_1T[0] < 3
        expected = np.einsum("TM,TMN->TN", x_TM, weights_EMM[np.minimum(expert_1T[0], 2)])
        self.assertAllClose(y_TM[has_expert], expected[has_expert], atol=1e-4, rtol=1e-4)

    def test_expected_blocks_are_those_of_binomial_loads(self):
        rng = np.random.default_rng(0)
        for tokens, probability, block in (
            (64, 1 / 16, 8),
            (1024, 1 / 16, 128),
            (4096, 1 / 4, 512),
        ):
            loads = rng.binomial(tokens, probability, size=100_000)
            found = stacked_experts.expected_blocks(tokens, probability, block)
            self.assertAllClose(found, np.mean(-(-loads // block)), rtol=0.01)
        # The experts that at least one of 64 tokens chooses: E(1 - (1 - k/E)^T).
        self.assertAllClose(
            128 * stacked_experts.expected_blocks(64, 8 / 128, 64), 128 * (1 - (1 - 1 / 16) ** 64)
        )
        self.assertEqual(stacked_experts.expected_blocks(20, 1.0, 8), 3)


if __name__ == "__main__":
    testing.main()
