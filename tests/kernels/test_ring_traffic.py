# tests: wings/kernels/layers/fused_ring.py, wings/long_inputs/ring.py
"""Tests what a ring of kernels sends, and rings of bfloat16, of caps and of another row's keys."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.kernel_use import KernelUse
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.layers.attention.kernel import SoftmaxOptions
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.long_inputs.ring import RingKernel
from tests.kernels import programs

B, N, D = 1, 2, 32
LETTERS = ("BNLD", "BNLD", "BNLD", "BL", "BL")


def attention_step(params, dtype="float32", cap=0.0, is_causal=True):
    """Returns a step: the output of attention, and the gradients of a loss."""
    kernel = params.instantiate()

    def step(query, keys, values, segments, key_segments):
        sources = [query, keys, values]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            layouts = ("BNLD", kernel.keys_layout, kernel.keys_layout)
            marked = [
                annotate(tf.cast(x, dtype), layout)
                for x, layout in zip(sources, layouts, strict=True)
            ]
            mask = kernel.prepare(AttentionMask(segments, key_segments, is_causal))
            mixed = tf.cast(kernel.attend(*marked, mask, SoftmaxOptions(cap=cap)), tf.float32)
            loss = tf.reduce_sum(tf.sin(mixed))
        found = [mixed, *tape.gradient(loss, sources)]
        return [(str(i), annotate(x, "BNLD"), None) for i, x in enumerate(found)]

    return step


def placed(executable, inputs, arrays):
    """Returns arrays on the devices of an executable."""
    mesh = executable.input_shardings[0].mesh
    return [a.put(x, mesh) for a, x in zip(inputs, arrays, strict=True)]


class RingTrafficTest(testing.TestCase, parameterized.TestCase):
    def compiled(self, step, platform, devices, queries=256, keys=256, shared=N):
        """Returns the executable of a step, and its random rows."""
        partitioning = Partitioning.make(f"context={devices}", "L->context").on(platform)
        shapes = [(B, N, queries, D), *[(B, shared, keys, D)] * 2, (B, queries), (B, keys)]
        generator = np.random.default_rng(1)
        arrays = [generator.normal(size=x).astype(np.float32) / 2 for x in shapes[:3]]
        # All segments of queries have keys.
        arrays += [(np.arange(x[1]) * 3 // x[1] + 1)[None].astype(np.int32) for x in shapes[3:]]
        named = [
            (str(i), array.shape, letters, array.dtype.name)
            for i, (array, letters) in enumerate(zip(arrays, LETTERS, strict=True))
        ]
        made = programs.lowered(step, named, partitioning)
        self.assertEqual(made.kernels, (KernelUse("", "attention"),) if platform else ())
        return programs.compiled(made, arrays)

    def run_step(self, *step, **sizes):
        """Returns the results of a step on random rows."""
        executable, arrays = self.compiled(*step, **sizes)
        return list(map(np.asarray, executable(*arrays)))

    @pytest.mark.slow
    def test_a_step_sends_these_bytes_and_no_others(self):
        self.check_traffic(1, True)

    @parameterized.parameters((N, True), (N, False), (1, False))
    @pytest.mark.slow
    def test_other_rings_send_these_bytes_and_no_others(self, shared, is_balanced):
        self.check_traffic(shared, is_balanced)

    def check_traffic(self, shared, is_balanced):
        devices, length = 3, 256
        step = attention_step(RingKernel.params().set(is_balanced=is_balanced))
        executable, _ = self.compiled(
            step, "cuda_interpreted", devices, devices * length, devices * length, shared
        )
        query, keys, segments = (4 * B * length * x for x in (N * D, shared * D, 1))
        sent = collections.Counter()
        # Keys and values rotate in the forward and the backward pass, then their gradients.
        sent[keys] += 2 * 2 * (devices - 1) + 2 * devices
        sent[segments] += 2 * (devices - 1)
        if is_balanced:
            # Halves of queries and outputs, of keys and values, and of all gradients of these.
            sent[query // 2] += 2 * 2
            sent[keys // 2] += 2 * 2
            sent[segments // 2] += 2
        found = collections.Counter()
        for call in executable.collectives():
            self.assertEqual(call.kind, "collective-permute")
            self.assertEqual(call.group_size, devices)
            found[call.bytes] += call.times
        self.assertEqual(found, sent)

    @parameterized.product(platform=("tpu_interpreted", "cuda_interpreted"), shared=(N, 1))
    @pytest.mark.slow
    def test_bfloat16_is_as_near_to_float32_as_without_kernels(self, platform, shared):
        sizes = {"queries": 512, "keys": 512, "shared": shared}
        exact = self.run_step(attention_step(DenseKernel.params()), "", 1, **sizes)
        ring = attention_step(RingKernel.params(), "bfloat16")
        found, portable = (self.run_step(ring, name, 2, **sizes) for name in (platform, ""))
        for ours, theirs, expected in zip(found, portable, exact, strict=True):
            error, usual = (np.sqrt(np.mean((x - expected) ** 2)) for x in (ours, theirs))
            self.assertLess(error, 1.25 * usual)

    @parameterized.parameters("tpu_interpreted", "cuda_interpreted")
    @pytest.mark.slow
    def test_keys_of_another_row_and_a_cap(self, platform):
        sizes = {"queries": 256, "keys": 640}
        options = {"cap": 2.0, "is_causal": False}
        found = self.run_step(attention_step(RingKernel.params(), **options), platform, 2, **sizes)
        dense = attention_step(DenseKernel.params(), **options)
        self.assertAllClose(found, self.run_step(dense, "", 1, **sizes), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    testing.main()
