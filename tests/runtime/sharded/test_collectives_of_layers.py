# tests: layers/embedding.py, layers/attention/self_attention.py, layers/moe/layer.py
# tests: layers/feed_forward.py
"""Checks the collectives of single layers in compiled HLO, forward and backward.

The tests compute gradients of weights and input from a given output gradient, so neither loss nor
optimizer adds collectives.
"""

import functools

import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.embedding import Softmax, TokenEmbedding
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.sharding.options import PARTITIONERS
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.published_layers.routers import ExpertChoiceRouter
from tests.layers.moe.dispatch_names import dispatch_params

B, L, M, H, E, N, V = 8, 16, 32, 64, 8, 8, 128

# Parts of a layer to compile.
FORWARD, GRADIENTS, BOTH = "forward", "gradients", "both"

each_partitioner = pytest.mark.parametrize("partitioner", PARTITIONERS)
# Shardy has one fast case, with all-to-alls; test_partitioning_log.py has other ones.
mostly_gspmd = pytest.mark.parametrize(
    "partitioner", ["gspmd", pytest.param("shardy", marks=pytest.mark.slow)]
)
each_dispatch = pytest.mark.parametrize(
    "dispatch", ["gather", pytest.param("einsum", marks=pytest.mark.slow)]
)


@functools.cache
def moe(dispatch: str = "gather", experts: int = E) -> Layer:
    params = MixtureOfExperts.params().set(
        model_dim=M, hidden_dim=H, num_experts=experts, group_size=L
    )
    return params.set(dispatch=dispatch_params(dispatch)).instantiate(path="moe")


@functools.cache
def expert_choice() -> Layer:
    params = MixtureOfExperts.params().set(model_dim=M, hidden_dim=H, num_experts=E, group_size=L)
    return params.set(router=ExpertChoiceRouter.params()).instantiate(path="moe")


@functools.cache
def feed_forward() -> Layer:
    return FeedForward.params().set(model_dim=M, hidden_dim=H).instantiate(path="feed_forward")


@functools.cache
def attention() -> Layer:
    params = SelfAttention.params().set(model_dim=M, num_heads=N)
    return params.instantiate(path="attention")


def vocabulary(params) -> Layer:
    return params.set(model_dim=M, vocabulary_size=V).instantiate(path="vocabulary")


def _call(layer: Layer, theta: NestedMap, x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    if isinstance(layer, TokenEmbedding):
        return layer.fprop(theta, mask)
    if isinstance(layer, Softmax):
        return layer.fprop(theta, x)
    if isinstance(layer, SelfAttention):
        return layer.fprop(theta, x, layer.mask(None))
    return layer.fprop(theta, x, mask)


@functools.cache
def compiled(
    layer: Layer,
    mesh: str,
    strategy: str,
    part: str,
    partitioner: str = "gspmd",
    rows: int = B,
    with_padding: bool = True,
) -> Executable:
    """Compiles a layer's output, all gradients, or both."""
    specs = layer.variable_specs()
    output = "BLV" if isinstance(layer, Softmax) else "BLM"

    def run(theta, x_BLM, mask_BL, d_y):
        theta, x_BLM = annotate_weights(theta, specs), annotate(x_BLM, "BLM")
        mask_BL = annotate(mask_BL, "BL") if with_padding else tf.ones([rows, L], tf.int32)
        with context.scope(training=False), tf.GradientTape() as tape:
            tape.watch((theta, x_BLM))
            y = annotate(_call(layer, theta, x_BLM, mask_BL), output)
        if part == FORWARD:
            return y
        d_theta, d_x = tape.gradient(
            y, (theta, x_BLM), annotate(d_y, output), unconnected_gradients="zero"
        )
        d_theta = annotate_weights(d_theta.transform(tf.convert_to_tensor), specs)
        return (d_theta, annotate(d_x, "BLM")) if part == GRADIENTS else (y, d_theta, d_x)

    theta = specs.transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype))
    x, mask = tf.TensorSpec((rows, L, M)), tf.TensorSpec((rows, L), tf.int32)
    d_y = tf.TensorSpec((rows, L, V if output == "BLV" else M))
    return partition(run, mesh, strategy, partitioner=partitioner).compile(theta, x, mask, d_y)


def counts(*arguments, **options) -> dict[str, int]:
    return hlo.count_by_kind(compiled(*arguments, **options).collectives())


@each_partitioner
@each_dispatch
def test_expert_parallelism_needs_two_all_to_alls_each_way(dispatch, partitioner):
    """Dispatch and combine in each direction. The router's gradient adds an all-reduce."""
    forward, both = (
        compiled(moe(dispatch), "data=8", "expert", part, partitioner) for part in (FORWARD, BOTH)
    )
    assert hlo.count_by_kind(forward.collectives()) == {"all-to-all": 2}
    found = both.collectives()
    assert hlo.count_by_kind(found) == {"all-to-all": 4, "all-reduce": 1}
    (summed,) = (c for c in found if c.kind == "all-reduce")
    assert (summed.bytes, summed.op_name) == (4 * M * E, "gradient_tape/moe/router/MatMul")
    # One device's shard of [E,G,C,M], with 2 slots for each token.
    assert {c.bytes for c in found if c.kind == "all-to-all"} == {4 * B * 2 * L * M // 8}


@each_dispatch
def test_experts_that_do_not_divide_need_no_padding(dispatch):
    assert counts(moe(dispatch), "data=8", "expert", FORWARD, with_padding=False) == {
        "all-to-all": 2
    }
    assert counts(moe(dispatch, experts=6), "data=8", "expert", FORWARD) == {"all-to-all": 2}


def test_large_moe_needs_two_all_to_alls_each_way():
    """Has too many tokens for constant indices. Compiles without running."""
    assert counts(moe(), "data=8", "expert", FORWARD, rows=2**16) == {"all-to-all": 2}


@mostly_gspmd
@pytest.mark.parametrize("rows", [B, 2**16])
def test_expert_choice_needs_two_all_to_alls_each_way(partitioner, rows):
    """Sorting, gathering and summing are local to the groups' devices."""
    layout = "data=8", "expert"
    found = counts(expert_choice(), *layout, BOTH, partitioner, rows)
    assert found == {"all-to-all": 4, "all-reduce": 1}


def test_sharding_the_experts_hidden_dimension_adds_one_all_reduce():
    layout = "data=4,model=2", "expert_tensor"
    assert counts(moe(), *layout, FORWARD) == {"all-to-all": 2, "all-reduce": 1}
    # The sums over the parts of H, one forward and one backward in one instruction, and the
    # gradient of the router.
    assert counts(moe(), *layout, BOTH) == {"all-to-all": 4, "all-reduce": 2}


@mostly_gspmd
@pytest.mark.parametrize("make", [feed_forward, attention, moe])
def test_tensor_parallelism_needs_one_all_reduce_each_way(make, partitioner):
    """Over the parts of H or N: of the output forward, of the input's gradient backward.

    Outputs of experts are combined before they are summed. So are the gradients of both gates of a
    token, in the same instruction as those of the input.
    """
    gates = 2 if make is moe else 0
    for part, numbers in ((FORWARD, M), (GRADIENTS, M + gates)):
        (found,) = compiled(make(), "model=8", "tensor", part, partitioner).collectives()
        assert (found.kind, found.bytes) == ("all-reduce", 4 * B * L * numbers)


@pytest.mark.parametrize("make", [feed_forward, attention, moe])
def test_data_parallelism_needs_one_all_reduce_of_gradients(make):
    assert counts(make(), "data=8", "data", FORWARD) == {}
    (found,) = compiled(make(), "data=8", "data", GRADIENTS).collectives()
    weights = make().variable_specs().flatten()
    assert found.kind == "all-reduce"
    assert found.bytes == 4 * sum(tf.TensorShape(spec.shape).num_elements() for spec in weights)


@mostly_gspmd
@pytest.mark.parametrize("make", [feed_forward, attention, moe])
def test_fsdp_all_gathers_weights_and_reduces_gradients(make, partitioner):
    """On CPU, XLA uses an all-reduce and a slice instead of a reduce-scatter."""
    layer = make()
    sizes = [
        4 * tf.TensorShape(spec.shape).num_elements()
        for spec in layer.variable_specs().flatten()
        if "M" in spec.layout
    ]
    executable = compiled(layer, "data=8", "fsdp", FORWARD, partitioner)
    gathered = executable.collectives()
    assert {c.kind for c in gathered} == {"all-gather"}
    assert sum(c.bytes for c in gathered) == sum(sizes)
    executable = compiled(layer, "data=8", "fsdp", GRADIENTS, partitioner)
    assert executable.full_replications() == []
    kinds = hlo.count_by_kind(executable.collectives())
    assert kinds.pop("all-reduce") == 1 and kinds.keys() == {"all-gather"}
    (summed,) = (c for c in executable.collectives() if c.kind == "all-reduce")
    assert summed.bytes >= sum(sizes)
    for output, spec in zip(
        executable.output_shardings, layer.variable_specs().flatten(), strict=False
    ):
        part = output.shard_shape(spec.shape)
        assert part == tuple(
            size // 8 if letter == "M" else size
            for letter, size in zip(spec.layout, spec.shape, strict=True)
        )


@pytest.mark.parametrize(("is_softmax_weight", "rows"), [(True, B), (False, 64)])
def test_a_table_is_gathered_for_a_softmax_or_many_tokens(is_softmax_weight, rows):
    """64 rows are 128 tokens of each device, as many as the table has rows."""
    params = TokenEmbedding.params().set(is_softmax_weight=is_softmax_weight)
    layer = vocabulary(params)
    options = {"rows": rows}
    assert counts(layer, "data=8", "fsdp", FORWARD, **options) == {"all-gather": 1}
    assert counts(layer, "data=8", "fsdp", GRADIENTS, **options) == {"all-reduce": 1}


def test_exchanged_rows_are_those_of_the_tokens():
    """A device receives its tokens' rows forward, and parts of all tokens' gradients backward."""
    layer = vocabulary(TokenEmbedding.params())
    for part in (FORWARD, GRADIENTS):
        found = compiled(layer, "data=8", "fsdp", part).collectives()
        (exchanged,) = (c for c in found if c.kind == "all-to-all")
        assert exchanged.bytes == 4 * B * L * M // 8
        assert sum(c.bytes for c in found if c.kind == "all-gather") == 4 * B * L


@pytest.mark.parametrize(
    ("params", "mesh", "strategy", "forward", "gradients"),
    [
        # Ids are gathered, and parts of rows exchanged.
        (
            *(TokenEmbedding, "data=8", "fsdp"),
            *({"all-gather": 1, "all-to-all": 1}, {"all-gather": 1, "all-to-all": 1}),
        ),
        (TokenEmbedding, "model=8", "tensor", {"all-reduce": 1}, {}),
        (TokenEmbedding, "data=4,model=2", "data_tensor", {"all-reduce": 1}, {"all-reduce": 1}),
        (
            TokenEmbedding,
            "data=2,fsdp=2,model=2",
            "expert_fsdp_tensor",
            {"all-gather": 1, "all-reduce": 1},
            {"all-reduce": 1},
        ),
        (Softmax, "model=8", "tensor", {}, {"all-reduce": 1}),
        (Softmax, "data=8", "fsdp", {"all-gather": 1}, {"all-gather": 1, "all-reduce": 1}),
        # The gradient is summed over one axis and then over the other.
        pytest.param(
            *(TokenEmbedding, "data=2,context=4", "data_context", {}, {"all-reduce": 2}),
            marks=pytest.mark.slow,
        ),
        # Ids are gathered; the looked-up vectors are summed and sliced.
        pytest.param(
            *(TokenEmbedding, "model=8", "sequence_tensor"),
            *({"all-gather": 1, "all-reduce": 1}, {"all-gather": 2}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sharded_vocabulary_is_not_gathered(params, mesh, strategy, forward, gradients):
    layer = vocabulary(params.params())
    assert counts(layer, mesh, strategy, FORWARD) == forward
    assert counts(layer, mesh, strategy, GRADIENTS) == gradients
    for part in (FORWARD, GRADIENTS):
        assert compiled(layer, mesh, strategy, part).full_replications() == []
