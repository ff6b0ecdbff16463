# tests: wings/kernels/layers/fused_ring.py, wings/long_inputs/ring.py
"""Tests ring attention with kernels: values and gradients of dense attention, and equal work."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.kernel_use import KernelUse
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.layers.attention.kernel import SoftmaxOptions
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.dropout import DropoutMask
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.kernels.call import AttentionCall
from lingvo_gshard.wings.kernels.layers.fused_ring import FusedRing
from lingvo_gshard.wings.long_inputs.ring import RingKernel
from tests.kernels import programs

B, N, D = 2, 2, 32
STRATEGY = "B->data; L->context; N->model"
LAYOUTS = ("BNLD", "BNKD", "BNKD", "BL")
MESH = "data=1,context=4,model=1"

MASKS = {
    "causal": {"is_causal": True},
    "full": {},
    "window": {"is_causal": True, "window": 300},
    "both_sides": {"window": 200},
}


def attention_step(params, options, with_sinks=False, drops=False):
    """Returns a step: the gradients of a loss of attention over packed rows, and its output."""
    kernel = params.instantiate()
    letters = "BNLD" if isinstance(kernel, RingKernel) else "BNKD"

    def step(query, keys, values, segments):
        sinks_N = tf.range(N, dtype=tf.float32) if with_sinks else None
        sources = [query, keys, values, *([sinks_N] if with_sinks else [])]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            layouts = ("BNLD", letters, letters)
            marked = [annotate(x, a) for x, a in zip(sources, layouts, strict=False)]
            mask = kernel.prepare(AttentionMask(segments, **options))
            dropout = DropoutMask(0.3, tf.constant([3, -9])) if drops else None
            softmax = SoftmaxOptions(dropout=dropout, sinks_N=sources[3] if with_sinks else None)
            mixed = kernel.attend(*marked, mask, softmax)
            mixed = tf.where(segments[:, None, :, None] > 0, mixed, 0.0)
            loss = tf.reduce_sum(mixed**2)
        found = [mixed, *tape.gradient(loss, sources)]
        return [(str(i), x, None) for i, x in enumerate(found)]

    return step


def program(params, options, platform, mesh=MESH, length=512, shared=N, **of_step):
    partitioning = Partitioning.make(mesh, STRATEGY).on(platform)
    shapes = [(B, N, length, D), (B, shared, length, D), (B, shared, length, D), (B, length)]
    named = [(name, shape, "BNLD", "float32") for name, shape in zip("qkv", shapes, strict=False)]
    named.append(("s", shapes[3], "BL", "int32"))
    return programs.lowered(attention_step(params, options, **of_step), named, partitioning)


def values_of(length, shared):
    generator = np.random.default_rng(1)
    shapes = [(B, N, length, D), (B, shared, length, D), (B, shared, length, D)]
    arrays = [generator.normal(size=shape).astype(np.float32) / 4 for shape in shapes]
    segments = np.sort(generator.integers(0, 4, (B, length)), 1)[:, ::-1]
    return [*arrays, segments.astype(np.int32)]


class RingTest(testing.TestCase, parameterized.TestCase):
    def check(self, options, platform, ring=None, **settings):
        """Compares a ring of kernels with dense attention on one device."""
        params = RingKernel.params().set(**(ring or {}))
        made = program(params, options, platform, **settings)
        uses = (KernelUse("", "attention"),) if platform else ()
        self.assertEqual(made.kernels, uses)
        arrays = values_of(settings.get("length", 512), settings.get("shared", N))
        found, executable = programs.run(made, arrays)
        settings["mesh"] = "data=1,context=1,model=1"
        expected, _ = programs.run(program(DenseKernel.params(), options, "", **settings), arrays)
        for one, other in zip(found, expected, strict=True):
            self.assertAllClose(one, other, rtol=1e-5, atol=1e-5)
        return executable

    def test_a_ring_of_kernels_equals_dense_attention(self):
        mesh = "data=1,context=2,model=1"
        executable = self.check(MASKS["window"], "tpu_interpreted", mesh=mesh)
        self.check_collectives(executable)

    @pytest.mark.slow
    def test_a_longer_ring_of_kernels_equals_dense_attention(self):
        executable = self.check(MASKS["causal"], "tpu_interpreted", length=1024)
        self.check_collectives(executable)

    def check_collectives(self, executable):
        self.assertEqual({call.kind for call in executable.collectives()}, {"collective-permute"})

    @parameterized.parameters(
        ("causal", "cuda_interpreted", {"mesh": "data=1,context=2,model=1"}),
        ("causal", "", {"mesh": "data=2,context=2,model=2"}),
    )
    @pytest.mark.slow
    def test_a_ring_drops_the_weights_that_dense_attention_drops(self, mask, platform, settings):
        self.check(MASKS[mask], platform, shared=1, drops=True, **settings)

    @parameterized.product(mask=("full", "window"), platform=("cuda_interpreted", ""))
    @pytest.mark.slow
    def test_rings_with_other_masks_drop_the_same_weights(self, mask, platform):
        self.check(MASKS[mask], platform, drops=True, with_sinks=True)

    @parameterized.product(
        mask=sorted(MASKS), platform=("tpu_interpreted", "cuda_interpreted"), shared=(1, 2)
    )
    @pytest.mark.slow
    def test_all_masks_and_heads(self, mask, platform, shared):
        self.check(MASKS[mask], platform, length=1024, shared=shared)

    @parameterized.parameters(
        ({"is_balanced": False}, {}),
        ({}, {"mesh": "data=1,context=3,model=1", "length": 768}),
        ({}, {"mesh": "data=2,context=2,model=2"}),
        ({}, {"with_sinks": True, "mesh": "data=1,context=2,model=1"}),
    )
    @pytest.mark.slow
    def test_other_rings(self, ring, settings):
        self.check(MASKS["causal"], "cuda_interpreted", ring, **settings)


class StepsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(2, 3, 4, 7)
    def test_a_balanced_ring_computes_each_visible_pair_of_chunks_once(self, devices):
        ring = FusedRing(AttentionCall(is_causal=True), "context", devices, 256, True)
        steps = ring.steps()
        self.assertLen(steps, devices - 1)
        chunks = [sorted((2 * i, 2 * devices - 1 - 2 * i)) for i in range(devices)]
        computed, work = set(), []
        for i, own in enumerate(chunks):
            pairs = {(q, k) for q in own for k in own if k < q}
            for t, step in enumerate(steps, 1):
                other = chunks[(i - t) % devices]
                block = step.before if other[0] < own[0] else step.behind
                queries = own[block.queries == "late" :]
                keys = other[:1] if block.keys == "early" else other
                pairs |= {(q, k) for q in queries for k in keys}
            work.append(len(pairs))
            computed |= pairs
        self.assertEqual(computed, {(q, k) for q in range(2 * devices) for k in range(q)})
        self.assertEqual(set(work), {2 * devices - 1})

    @parameterized.product(
        options=[{"window": 100}, {"window": 700}, {"is_causal": True, "window": 300}, {}],
        devices=(2, 5),
    )
    def test_consecutive_positions_hide_what_the_mask_hides(self, options, devices):
        """Compares the visible pairs of all calls with the mask of whole rows."""
        length = 64
        ring = FusedRing(AttentionCall(**options), "context", devices, length, False)
        steps = [None, *ring.steps()]
        place = np.arange(devices * length)
        distances = place[:, None] - place[None]
        window = options.get("window", 0)
        expected = np.abs(distances) <= window if window else np.ones_like(distances, bool)
        expected &= (distances >= 0) | (not options.get("is_causal"))
        found = np.zeros_like(expected)
        for i in range(devices):
            for t, step in enumerate(steps):
                j = (i - t) % devices
                block = None if step is None else step.before if i >= t else step.behind
                call = ring.call if step is None else block and block.call
                if call is None:
                    continue
                local = np.arange(length)
                distance = call.first_query + local[:, None] - local[None]
                seen = (
                    np.abs(distance) <= call.window if call.window else np.ones_like(distance, bool)
                )
                seen &= (distance >= 0) | (not call.is_causal)
                rows, columns = (
                    slice(i * length, (i + 1) * length),
                    slice(j * length, (j + 1) * length),
                )
                found[rows, columns] = seen
        self.assertAllEqual(found, expected)


if __name__ == "__main__":
    testing.main()
