# tests: wings/hlo/costs.py
"""Counts the products of groups that kernels compute, as compilers write their calls."""

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.wings.hlo import costs
from tests.hlo.parsing import parse_module

R, M, H, E = 4096, 512, 1024, 8
ROWS, PRODUCTS, WEIGHTS = f"bf16[{R},{M}]", f"bf16[{R},{H}]", f"bf16[{E},{M},{H}]"
USEFUL = 2 * R * M * H

MODULE = """
HloModule m
ENTRY e {{
  group = s32[11] parameter(0)
  start = s32[1] parameter(1)
  left = {left} parameter(2)
  right = {right} parameter(3)
  ROOT call = {result} custom-call(group, start, left, right), custom_call_target="{target}",
    metadata={{op_name="gradient_tape/moe/experts/{scope}/jit(gmm)"}}
}}
"""


def instruction(left, right, result, scope, target="tpu_custom_call"):
    text = MODULE.format(left=left, right=right, result=result, scope=scope, target=target)
    return parse_module(text.strip()).entry.root


class GroupedProductsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("fused_grouped_products_share_1.0625", ROWS, WEIGHTS, PRODUCTS, 1.0625),
        ("fused_grouped_products_share_0.2500", PRODUCTS, WEIGHTS, ROWS, 0.25),
        ("fused_grouped_products_gradient_share_1.0000", ROWS, PRODUCTS, WEIGHTS, 1),
        # Megablox takes the rows of the gradient transposed.
        ("fused_grouped_products_gradient_share_1.0000", f"bf16[{M},{R}]", PRODUCTS, WEIGHTS, 1),
        ("experts", ROWS, WEIGHTS, PRODUCTS, 0),
    )
    def test_products_are_counted_by_rows_in_groups(self, scope, left, right, result, products):
        call = instruction(left, right, result, scope)
        self.assertEqual(costs.matmul_flops(call), products * USEFUL)
        self.assertEqual(costs.is_grouped_products(call), products > 0)
        self.assertIsNone(costs.fused_attention(call))
        if products:
            self.assertEqual(costs.product_dtype(call), "bf16")

    @parameterized.parameters(("", 1), ("_read_0.2500", 0.25))
    def test_weights_of_groups_without_rows_are_not_read(self, read, expected):
        scope = f"fused_grouped_products_share_16.0000{read}"
        call = instruction(ROWS, WEIGHTS, PRODUCTS, scope)
        positions, rows, weights = call.operands[:2], call.operands[2], call.operands[3]
        others = sum(x.shape.bytes for x in positions) + rows.shape.bytes + call.shape.bytes
        self.assertEqual(costs.memory_bytes(call) - others, weights.shape.bytes * expected)
        self.assertEqual(costs.matmul_flops(call), 16 * USEFUL)

    def test_calls_that_reserve_memory_are_no_products(self):
        text = (
            "HloModule m\nENTRY e {\n  ROOT call = bf16[8,8] custom-call(), "
            'custom_call_target="AllocateBuffer", '
            'metadata={op_name="moe/fused_grouped_products_share_1.0000/jit(gmm)"}\n}'
        )
        call = parse_module(text).entry.root
        self.assertFalse(costs.is_grouped_products(call))
        self.assertEqual(costs.matmul_flops(call), 0)


if __name__ == "__main__":
    testing.main()
