# tests: wings/kernels/block_products.py, wings/low_precision/block_products.py
"""Tests products of blocks of 32 numbers: kernel and simulation, one device and eight, compiled."""

import re

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers import products
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.hlo.operations import collective_calls
from lingvo_gshard.wings.low_precision.nvfp4 import EachKey, Nvfp4
from lingvo_gshard.wings.low_precision.rounding import ROUNDINGS
from lingvo_gshard.wings.planning.machines import compilers, topologies
from tests.kernels import programs

SIZES = {"B": 8, "L": 64, "M": 128, "H": 256, "N": 8, "D": 32, "E": 8, "G": 8, "C": 32}
EQUATIONS = ("BLM,MH->BLH", "BLM,MND->BLND", "BLND,NDM->BLM", "EGCM,EMH->EGCH")
MESHES = (
    ("data=8", "data"),
    ("data=8", "fsdp"),
    ("data=4,model=2", "data_tensor"),
    ("data=2,model=4", "fsdp_sequence_tensor"),
    ("data=8", "expert_fsdp"),
)


def program(equation, mesh, strategy, platform, sizes, dtype="float32", rounding=None):
    """Returns the program of a product and of both gradients, by default in MXFP8."""
    fields = {"rounding": rounding or ROUNDINGS["mxfp8"], "rules": (EachKey(),)}
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    shapes = [tuple(sizes[letter] for letter in layout) for layout in (left, right, output)]

    def step(x, w, dz):
        scope = context.scope(training=True, seed=tf.constant([1, 0]))
        with scope, context.override_extension(products.ProductContext, **fields):
            sources = [annotate(x, left), annotate(w, right, "weights")]
            with tf.GradientTape() as tape:
                tape.watch(sources)
                z = products.multiply(equation, *sources)
            dx, dw = tape.gradient(z, sources, annotate(dz, output))
        found = [z, annotate(dx, left), annotate(dw, right, "weights")]
        return [(str(i), value, None) for i, value in enumerate(found)]

    partitioning = Partitioning.make(mesh, strategy).on(platform)
    layouts = ((left, dtype), (right, "float32"), (output, dtype))
    named = [
        (name, shape, layout, kind)
        for name, shape, (layout, kind) in zip(("x", "w", "dz"), shapes, layouts, strict=True)
    ]
    return programs.lowered(step, named, partitioning)


def in_blocks(x, letters, summed):
    """Returns x rounded to e4m3 in blocks of 32 along a letter, by NumPy alone."""
    axis = letters.index(summed)
    moved = np.moveaxis(x.astype(np.float64), axis, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, 32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / 448.0))
    narrow = (blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.moveaxis((narrow * scale).reshape(moved.shape), -1, axis)


def expected(equation, x, w, dz):
    """Returns the product and both gradients of factors rounded along their sums."""
    inputs, output = equation.split("->")
    left, right = inputs.split(",")

    def product(first, second, result, x, y):
        summed = [c for c in first if c in second and c not in result][-1]
        factors = in_blocks(x, first, summed), in_blocks(y, second, summed)
        return np.einsum(f"{first},{second}->{result}", *factors)

    return (
        product(left, right, output, x, w),
        product(output, right, left, dz, w),
        product(output, left, right, dz, x),
    )


class BlockProductsTest(testing.TestCase, parameterized.TestCase):
    def check(self, equation, mesh, strategy, platform, sizes=None, obstacle=""):
        sizes = {**SIZES, **(sizes or {})}
        inputs, output = equation.split("->")
        generator = np.random.default_rng(1)
        arrays = [
            generator.normal(size=[sizes[c] for c in layout]).astype(np.float32)
            for layout in (*inputs.split(","), output)
        ]
        made = program(equation, mesh, strategy, platform, sizes)
        if platform:
            (use,) = made.kernels
            self.assertIn(obstacle, use.obstacle)
            self.assertEqual(bool(obstacle), bool(use.obstacle))
        found, _ = programs.run(made, arrays)
        if not sizes["M"] % 32:
            for one, other in zip(found, expected(equation, *arrays), strict=True):
                self.assertAllClose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())
        return found

    @parameterized.parameters("", "cuda_interpreted")
    def test_products_and_gradients_on_one_device(self, platform):
        self.check("BLND,NDM->BLM", "data=1", "replicated", platform)

    @parameterized.parameters(*MESHES[2:4])
    def test_a_mesh(self, mesh, strategy):
        self.check("BLM,MH->BLH", mesh, strategy, "cuda_interpreted")

    @parameterized.product(
        [dict(mesh=mesh, strategy=strategy) for mesh, strategy in MESHES], equation=EQUATIONS
    )
    @pytest.mark.slow
    def test_meshes(self, mesh, strategy, equation):
        self.check(equation, mesh, strategy, "cuda_interpreted")

    @parameterized.parameters(("data=1", "replicated"), *MESHES[2:4])
    def test_the_kernel_multiplies_the_factors_of_nvfp4(self, mesh, strategy):
        """Without a kernel, one device multiplies the same factors in float32."""
        generator, equation = np.random.default_rng(1), "BLM,MH->BLH"
        arrays = [
            generator.normal(size=[SIZES[c] for c in layout]).astype(np.float32)
            for layout in ("BLM", "MH", "BLH")
        ]
        found = []
        for place in ((mesh, strategy, "cuda_interpreted"), ("data=1", "replicated", "")):
            made = program(equation, *place, SIZES, rounding=Nvfp4())
            self.assertEqual([use.obstacle for use in made.kernels], [""] if place[2] else [])
            found.append(programs.run(made, arrays)[0])
        for one, other in zip(*found, strict=True):
            self.assertAllClose(one, other, rtol=0, atol=2e-6 * np.abs(other).max())

    def test_letters_without_whole_blocks_are_simulated(self):
        """33 positions of each row are no whole blocks; M of 96 has none on two devices."""
        equation, sizes = "BLM,MH->BLH", {"M": 96, "L": 64}
        made = self.check(equation, "data=1", "replicated", "cuda_interpreted", sizes)
        self.assertLen(made, 3)
        made = program(equation, "data=1", "replicated", "cuda", {**SIZES, "L": 33})
        obstacles = sorted(use.obstacle for use in made.kernels)
        self.assertEqual(obstacles, ["", "L of 33 is not divided into blocks of 32"])
        made = program("BLH,HM->BLM", "model=2", "tensor", "cuda", {**SIZES, "H": 96})
        self.assertIn(
            "H of 96 is not divided into blocks of 32 on each of 2 devices",
            {use.obstacle for use in made.kernels},
        )


@pytest.mark.slow
class CompiledTest(testing.TestCase, parameterized.TestCase):
    def compile(self, mesh, strategy, rounding=None):
        topology = topologies.get("gpu:b200:1x4")
        if compilers.available("gpu") != "gpu":
            self.skipTest("the compiler for gpu is not installed")
        sizes = {"B": 16, "L": 2048, "M": 1024, "H": 4096}
        made = program("BLM,MH->BLH", mesh, strategy, "cuda", sizes, "bfloat16", rounding)
        compiled = made.lower(topology.compile_devices()).compile()
        return hlo.read_operations(hlo.read_module(compiled), made.mesh, frozenset()).operations

    @parameterized.parameters(("data=4", "data"), ("data=2,model=2", "fsdp_sequence_tensor"))
    def test_three_products_are_cudnn_s_of_blocks(self, mesh, strategy):
        operations = self.compile(mesh, strategy)
        found = [each for each in operations if each.matmul_flops]
        self.assertLen(found, 3)
        for each in found:
            self.assertEqual(each.dtype, "float8_e4m3fn")
            self.assertEqual(each.matmul_flops, 2 * 16 * 2048 * 1024 * 4096 // 4)

    @parameterized.parameters(("data=4", "data"), ("data=2,model=2", "fsdp_sequence_tensor"))
    def test_three_products_are_cudnn_s_in_nvfp4(self, mesh, strategy):
        operations = self.compile(mesh, strategy, Nvfp4())
        # Those with the Hadamard matrix are small, and in float32.
        found = [each for each in operations if each.matmul_flops and each.dtype != "float32"]
        self.assertLen(found, 3)
        for each in found:
            self.assertEqual(each.dtype, "float4_e2m1fn")
            self.assertEqual(each.matmul_flops, 2 * 16 * 2048 * 1024 * 4096 // 4)
        gathered = [c for c in collective_calls(operations) if c.kind == "all-gather"]
        self.assertFalse([call for call in gathered if "float4" in call.dtype])

    def test_factors_are_gathered_in_8_bits(self):
        calls = collective_calls(self.compile("data=2,model=2", "fsdp_sequence_tensor"))
        gathered = [call for call in calls if call.kind == "all-gather"]
        self.assertNotEmpty(gathered)
        for call in gathered:
            self.assertRegex(call.dtype, re.compile("float8"))


if __name__ == "__main__":
    testing.main()
