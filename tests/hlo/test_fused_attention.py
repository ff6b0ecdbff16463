# tests: wings/hlo/costs.py, wings/kernels/call.py
"""Counts the products of attentions that kernels compute, as compilers write their calls."""

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.wings.hlo import costs
from lingvo_gshard.wings.hlo.operations import FusedAttention
from lingvo_gshard.wings.kernels.call import AttentionCall
from tests.hlo.parsing import parse_module

B, N, SHARED, L, K, D = 2, 4, 2, 512, 1024, 64
QUERY, KEYS = f"bf16[{B},{N},{L},{D}]", f"bf16[{B},{SHARED},{K},{D}]"
ROWS = f"f32[{B},{N},{L}]"
PRODUCT = 2 * B * N * L * K * D

MODULE = """
HloModule m
ENTRY e {{
  info = s8[1,4,4] parameter(0)
  q = {query} parameter(1)
  k = {keys} parameter(2)
  v = {keys} parameter(3)
  sums = {rows} parameter(4)
  mixed = {query} parameter(5)
  ROOT call = {result} custom-call(info, q, k, v, sums, mixed), custom_call_target="{target}",
    metadata={{op_name="decoder/layer/{scope}/XlaCustomCallV2"}}
}}
"""


def instruction(result, target="tpu_custom_call", scope="fused_attention_share_0.5000"):
    text = MODULE.format(
        query=QUERY, keys=KEYS, rows=ROWS, result=result, target=target, scope=scope
    )
    return parse_module(text.strip()).entry.root


class FusedAttentionTest(testing.TestCase, parameterized.TestCase):
    def test_packed_segments_have_positions_before_heads(self):
        """cuDNN reads arrays [B,length,N,D], and lengths and offsets of segments."""
        packed = """
        HloModule m
        ENTRY e {
          q = bf16[2,512,4,64] parameter(0)
          k = bf16[2,512,2,64] parameter(1)
          v = bf16[2,512,2,64] parameter(2)
          lengths = s32[2,8] parameter(3)
          begins = s32[2,9] parameter(4)
          ROOT call = (RESULTS, u8[9999999]) custom-call(q, k, v, lengths, lengths, begins, begins),
            custom_call_target="__cudnn$fmhaSoftmax",
            metadata={op_name="decoder/layer/fused_attentionNAME_share_0.5000/XlaCustomCallV2"}
        }
        """
        query, keys = "bf16[2,4,512,64]", "bf16[2,2,512,64]"
        for results, name, products in (
            (f"{query}, f32[16,4,512]", "", 2),
            (f"{query}, {keys}, {keys}", "_gradient", 5),
        ):
            text = packed.strip().replace("RESULTS", results).replace("NAME", name)
            call = parse_module(text).entry.root
            self.assertEqual(costs.fused_attention(call), FusedAttention(512, bool(name), True, 64))
            self.assertEqual(costs.matmul_flops(call), products * 2 * 2 * 4 * 512 * 512 * 64 / 2)
            # What cuDNN works in is mostly not written: it has room for each possible segment.
            self.assertLess(costs.memory_bytes(call), 3 * 2**20)

    @parameterized.parameters(
        ("fused_attention_share_0.5000", f"({QUERY}, {ROWS})", 0.5 * 2),
        ("fused_attention_gradient_share_1.0000", QUERY, 3),
        ("fused_attention_gradient_share_0.2500", f"(f32[4,512,128], {KEYS}, {KEYS})", 0.25 * 4),
        ("fused_attention_gradient_share_1.0000", f"({QUERY}, {KEYS}, {KEYS}, u8[8])", 5),
        # Three terms of the queries' gradient.
        ("fused_attention_gradient_share_1.0000", f"(bf16[{B},3,{N},{L},{D}], {KEYS}, {KEYS})", 5),
        ("attention", f"({QUERY}, {ROWS})", 0),
    )
    def test_products_are_counted_by_what_the_kernel_returns(self, scope, result, products):
        call = instruction(result, scope=scope)
        self.assertEqual(costs.matmul_flops(call), products * PRODUCT)
        self.assertEqual(costs.is_matmul(call), products > 0)
        if products:
            self.assertEqual(costs.product_dtype(call), "bf16")

    def test_a_batch_of_one_row_may_have_lost_its_dimension(self):
        """The compiler for TPUs leaves it out."""
        query, keys, scratch = "bf16[4,512,64]", "bf16[2,1024,64]", "f32[4,512,128]"
        for result, scope, products in (
            (f"({query}, f32[4,512])", "fused_attention_share_1.0000", 2),
            (f"({scratch}, {keys}, {keys})", "fused_attention_gradient_share_1.0000", 4),
            (f"(bf16[3,4,512,64], {keys}, {keys})", "fused_attention_gradient_share_1.0000", 5),
        ):
            text = MODULE.format(
                query=query,
                keys=keys,
                rows="f32[4,512]",
                result=result,
                target="tpu_custom_call",
                scope=scope,
            )
            call = parse_module(text.strip()).entry.root
            self.assertEqual(costs.matmul_flops(call), products * PRODUCT / B)
            self.assertEqual(costs.fused_attention(call).keys, K)

    def test_the_kernel_is_described(self):
        scope = "gradient_tape/x/fused_attention_gradient_share_0.5625"
        call = instruction(f"({QUERY}, {KEYS}, {KEYS})", "__cudnn$fmhaSoftmaxBackward", scope)
        self.assertEqual(costs.fused_attention(call), FusedAttention(K, True, True, D))

    def test_the_share_counts_blocks_with_a_visible_key(self):
        causal, window = AttentionCall(is_causal=True), AttentionCall(window=100)
        # 4 blocks of 512: the diagonal and what is before it.
        self.assertEqual(causal.computed_share(2048, 2048, 512, 512), 10 / 16)
        # A block sees its neighbors on both sides.
        self.assertEqual(window.computed_share(2048, 2048, 512, 512), 10 / 16)
        later = AttentionCall(is_causal=True, first_query=512)
        self.assertEqual(later.computed_share(512, 1024, 512, 512), 1.0)
        self.assertEqual(AttentionCall().computed_share(100, 100, 64, 64), 1.0)


if __name__ == "__main__":
    testing.main()
