"""Attributes instructions without a useful name to layers and phases."""

from lingvo_gshard.sharding.mesh import Mesh
from tests.hlo.parsing import operations_of_text

LAYERS = ["encoder", "encoder/layers/body_0", "encoder/layers/body_0/feed_forward", "softmax"]
FEED_FORWARD = "encoder/layers/body_0/feed_forward"


def places(body, computations=""):
    """Returns the (layer, phase) of each operation by name."""
    lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
    text = f"{computations}ENTRY %main {{\n{lines}}}\n"
    found = operations_of_text(text, Mesh.parse("data=2"), LAYERS)
    return {o.name: (o.layer, o.phase) for o in found.operations}


def test_a_product_without_a_name_belongs_to_the_layer_that_uses_it():
    """The earliest phase counts: the forward pass computes tensors saved for the backward pass."""
    found = places(f"""%p = f32[8,8]{{1,0}} parameter(0)
        %d = f32[8,8]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
        %b = f32[8,8]{{1,0}} negate(%d), metadata={{op_name="gradient_tape/{FEED_FORWARD}/Neg"}}
        %f = f32[8,8]{{1,0}} tanh(%d), metadata={{op_name="{FEED_FORWARD}/Tanh"}}
        ROOT %s = f32[8,8]{{1,0}} add(%f, %b), metadata={{op_name="softmax/add"}}""")
    assert found["d"] == (FEED_FORWARD, "forward")
    assert found["b"] == (FEED_FORWARD, "backward")


def test_a_product_that_the_optimizer_uses_is_a_gradient():
    found = places(f"""%p = f32[8,8]{{1,0}} parameter(0)
        %d = f32[8,8]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
        ROOT %u = f32[8,8]{{1,0}} negate(%d), \
metadata={{op_name="optimizer/{FEED_FORWARD}/w_in/Neg"}}""")
    assert found == {"d": (FEED_FORWARD, "backward"), "u": (FEED_FORWARD, "optimizer")}


def test_an_optimizer_may_have_products_of_its_own():
    scope = f"optimizer/{FEED_FORWARD}/w_in/while/body/_1/while/einsum"
    found = places(f"""%p = f32[8,8]{{1,0}} parameter(0)
        %d = f32[8,8]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, \
metadata={{op_name="{scope}/Einsum"}}
        ROOT %u = f32[8,8]{{1,0}} negate(%d), \
metadata={{op_name="optimizer/{FEED_FORWARD}/w_in/Neg"}}""")
    assert set(found.values()) == {(FEED_FORWARD, "optimizer")}


def test_a_product_without_a_name_is_dispatch_if_its_neighbors_are():
    """A matmul between dispatch and combine belongs to an expert."""
    product = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = f"""ENTRY %main {{
  %p = f32[8,8]{{1,0}} parameter(0)
  %m = f32[8,8]{{1,0}} tanh(%p), metadata={{op_name="{FEED_FORWARD}/dispatch/one_hot"}}
  %x = f32[8,8]{{1,0}} dot(%m, %p), {product}
  %t = f32[8,8]{{1,0}} negate(%x), metadata={{op_name="{FEED_FORWARD}/dispatch/transpose"}}
  %h = f32[8,8]{{1,0}} dot(%t, %p), {product}
  %r = f32[8,8]{{1,0}} tanh(%h), metadata={{op_name="{FEED_FORWARD}/Tanh"}}
  %y = f32[8,8]{{1,0}} dot(%r, %p), {product}
  ROOT %c = f32[8,8]{{1,0}} negate(%y), metadata={{op_name="{FEED_FORWARD}/combine/transpose"}}
}}
"""
    found = operations_of_text(text, Mesh.parse("data=2"), LAYERS).operations
    assert {o.name: o.dispatch for o in found if o.matmul_flops} == {
        "x": True,
        "h": False,
        "y": False,
    }


def test_operands_in_a_sublayer_of_the_user_take_precedence():
    found = places(f"""%p = f32[8,8]{{1,0}} parameter(0)
        %x = f32[8,8]{{1,0}} tanh(%p), metadata={{op_name="rematerialized/{FEED_FORWARD}/Tanh"}}
        %d = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
        ROOT %s = f32[8,8]{{1,0}} add(%d, %d), metadata={{op_name="gradient_tape/encoder/x"}}""")
    assert found["x"] == (FEED_FORWARD, "rematerialized")
    assert found["d"] == (FEED_FORWARD, "backward")


def test_saving_a_value_belongs_to_the_layer_that_computed_it():
    found = places(f"""%p = f32[8,8]{{1,0}} parameter(0)
        %x = f32[8,8]{{1,0}} tanh(%p), metadata={{op_name="{FEED_FORWARD}/Tanh"}}
        ROOT %c = f32[8,8]{{0,1}} copy(%x), metadata={{op_name="while/TensorListPushBack_1"}}""")
    assert found["c"] == (FEED_FORWARD, "forward")


def test_a_fusion_belongs_to_the_layer_of_its_product_or_of_most_elements():
    fused = f"""%fused (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  %d = f32[8,8]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, \
metadata={{op_name="{FEED_FORWARD}/einsum/Einsum"}}
  ROOT %a = f32[8,8]{{1,0}} add(%d, %d), metadata={{op_name="softmax/add"}}
}}

%other (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  %t = f32[8,8]{{1,0}} tanh(%p), metadata={{op_name="softmax/Tanh"}}
  ROOT %a = f32[8,8]{{1,0}} add(%t, %t)
}}

"""
    found = places(
        """%p = f32[8,8]{1,0} parameter(0)
        %f = f32[8,8]{1,0} fusion(%p), kind=kOutput, calls=%fused, metadata={op_name="softmax/add"}
        ROOT %o = f32[8,8]{1,0} fusion(%f), kind=kLoop, calls=%other, metadata={op_name="add_3"}""",
        fused,
    )
    assert found == {"f": (FEED_FORWARD, "forward"), "o": ("softmax", "forward")}


def test_a_copy_for_a_loop_belongs_to_the_layer_that_uses_it_there():
    loop = f"""%body (s: (f32[8,8], f32[8,8])) -> (f32[8,8], f32[8,8]) {{
  %s = (f32[8,8]{{1,0}}, f32[8,8]{{1,0}}) parameter(0)
  %x = f32[8,8]{{1,0}} get-tuple-element(%s), index=0
  %w = f32[8,8]{{1,0}} get-tuple-element(%s), index=1
  %y = f32[8,8]{{1,0}} multiply(%x, %w), metadata={{op_name="{FEED_FORWARD}/mul"}}
  ROOT %t = (f32[8,8]{{1,0}}, f32[8,8]{{1,0}}) tuple(%y, %w)
}}

%condition (s: (f32[8,8], f32[8,8])) -> pred[] {{
  %s = (f32[8,8]{{1,0}}, f32[8,8]{{1,0}}) parameter(0)
  ROOT %never = pred[] constant(false)
}}

"""
    found = places(
        """%p = f32[8,8]{1,0} parameter(0), metadata={op_name="args[0]"}
        %c = f32[8,8]{0,1} copy(%p)
        %t = (f32[8,8]{1,0}, f32[8,8]{0,1}) tuple(%p, %c)
        %l = (f32[8,8]{1,0}, f32[8,8]{0,1}) while(%t), condition=%condition, body=%body
        ROOT %r = f32[8,8]{1,0} get-tuple-element(%l), index=0""",
        loop,
    )
    assert found == {"c": (FEED_FORWARD, "forward")}


def test_a_prefetch_belongs_to_the_layer_that_uses_the_weight():
    """TPUs copy weights whole or in slices, which one operation then sees as one array."""
    slices = "".join(
        f"""%slice{i} {{
  %x = f32[8,8]{{1,0}} parameter(0)
  ROOT %s = f32[4,8]{{1,0:S(1)}} slice(%x), slice={{[{4 * i}:{4 * i + 4}], [0:8]}}
}}

"""
        for i in (0, 1)
    )
    starts = "".join(
        f"""%from{i} = ((f32[8,8]{{1,0}}), f32[4,8]{{1,0:S(1)}}, s32[]{{:S(2)}}) \
async-start(%w), calls=%slice{i}
        %d{i} = f32[4,8]{{1,0:S(1)}} async-done(%from{i})
        """
        for i in (0, 1)
    )
    found = places(
        f"""%w = f32[8,8]{{1,0}} parameter(0), metadata={{op_name="args[0]"}}
        %v = f32[8,8]{{1,0}} parameter(1), metadata={{op_name="args[1]"}}
        {starts}%m = f32[8,8]{{1,0:S(1)}} custom-call(%d0, %d1), custom_call_target="ConcatBitcast"
        %c = (f32[8,8]{{1,0:S(1)}}, f32[8,8]{{1,0}}, u32[]{{:S(2)}}) copy-start(%v)
        %e = f32[8,8]{{1,0:S(1)}} copy-done(%c)
        %f = f32[8,8]{{1,0}} multiply(%m, %m), metadata={{op_name="{FEED_FORWARD}/mul"}}
        ROOT %o = f32[8,8]{{1,0}} add(%f, %e), metadata={{op_name="softmax/add"}}""",
        slices,
    )
    of_layer, of_softmax = (FEED_FORWARD, "forward"), ("softmax", "forward")
    assert found == {
        "from0": of_layer,
        "from1": of_layer,
        "f": of_layer,
        "c": of_softmax,
        "o": of_softmax,
    }


SUM = """%sum {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

"""

COMBINED = """%p = f32[8,8]{{1,0}} parameter(0)
    %q = f32[{rows},8]{{1,0}} parameter(1)
    %r = (f32[8,8]{{1,0}}, f32[{rows},8]{{1,0}}) all-reduce(%p, %q), replica_groups={{{{0,1}}}}, \
to_apply=%sum, metadata={{op_name="jit(f)/gradient_tape/encoder/({names})"}}
    ROOT %s = f32[8,8]{{1,0}} get-tuple-element(%r), index=0"""


def test_a_combined_collective_belongs_to_the_layer_of_most_bytes_or_the_common_one():
    names = "layers/body_0/feed_forward/MatMul:layers/body_0/add/Sum"
    small, large = (places(COMBINED.format(rows=rows, names=names), SUM) for rows in (2, 8))
    assert small == {"r": (FEED_FORWARD, "backward")}
    assert large == {"r": ("encoder/layers/body_0", "backward")}
