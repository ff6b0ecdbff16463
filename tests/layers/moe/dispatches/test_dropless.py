"""Tests dropless dispatch against other dispatches and loops, on one device and on many."""

import functools
import math
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard import hlo
from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.dispatches import expert_blocks
from lingvo_gshard.layers.moe.dispatches.dropless import DroplessDispatch
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.routing import Assignment, TokenChoiceRouting
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.runtime.partition import partition
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.testing.tolerances import assert_close
from tests.layers.moe.dispatch_names import dispatch_params
from tests.layers.stacks.executions import loop, sequential

M, H, E = 4, 6, 4
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Makes blocks so small that few rows fill several, with final blocks of several sizes."""
    monkeypatch.setattr(expert_blocks, "LARGEST_BLOCK", 5)
    monkeypatch.setattr(expert_blocks, "SMALLEST_STEP", 1)
    monkeypatch.setattr(expert_blocks, "STEPS", 3)


def make(dispatch="dropless", experts=E, group_size=8, **values) -> MixtureOfExperts:
    params = MixtureOfExperts.params().set(
        model_dim=M,
        hidden_dim=H,
        num_experts=experts,
        group_size=group_size,
        dispatch=dispatch_params(dispatch),
    )
    for name, value in values.items():
        params.set_path(name.replace("__", "."), value)
    if dispatch != "dropless":
        params.router.capacity_factor = float(experts)
    return params.instantiate(path="moe")


def weights_of(layer) -> NestedMap:
    return layer.init(1).transform(
        lambda w: (
            w + 0.1 * np.sin(np.arange(w.shape.num_elements())).reshape(w.shape).astype(np.float32)
        )
    )


def both_ways(layer, theta, x, mask, training=False, seed=1) -> NestedMap:
    """Returns the output, metrics and all gradients."""
    sources = NestedMap(theta=theta, x=tf.convert_to_tensor(x))
    with (
        tf.GradientTape() as tape,
        context.scope(training=training, seed=tf.constant([seed, 0])) as scope,
    ):
        tape.watch(sources.flatten())
        y = layer.fprop(sources.theta, sources.x, mask)
        weights = np.cos(np.arange(math.prod(y.shape))).reshape(y.shape)
        total = tf.reduce_sum(y * tf.cast(weights, y.dtype))
    gradients = tape.gradient(total, sources.flatten(), unconnected_gradients="zero")
    metrics = NestedMap({name: value for name, (value, _) in scope.metrics.items()})
    return NestedMap(output=y, metrics=metrics, gradients=sources.pack(gradients))


def check_equal(one: NestedMap, other: NestedMap) -> None:
    for name in ("output", "gradients"):
        pairs = zip(tf.nest.flatten(one[name]), tf.nest.flatten(other[name]), strict=True)
        for actual, expected in pairs:
            assert_close(actual, expected, "order")


@hypothesis.given(
    experts=st.integers(2, 9),
    tokens=st.integers(1, 20),
    group_size=st.integers(1, 8),
    is_gated=st.booleans(),
    use_bias=st.booleans(),
    training=st.booleans(),
    seed=st.integers(0, 1000),
)
@hypothesis.settings(max_examples=8)
def test_equals_other_dispatches_if_no_token_is_dropped(
    experts, tokens, group_size, is_gated, use_bias, training, seed
):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(1, tokens, M)).astype(np.float32)
    mask = tf.constant(rng.random((1, tokens)) < 0.8, tf.int32)
    results = []
    for dispatch in ("dropless", "gather", "einsum"):
        layer = make(dispatch, experts, group_size, experts__use_bias=use_bias)
        if is_gated:
            layer = make(
                dispatch, experts, group_size, experts__use_bias=use_bias,
                experts__activation="swiglu",
            )  # fmt: skip
        results.append(both_ways(layer, weights_of(layer), x, mask, training))
    for other in results[1:]:
        check_equal(results[0], other)


@hypothesis.given(
    data=st.data(), choices=st.integers(1, 3), groups=st.integers(1, 3), size=st.integers(1, 7)
)
@hypothesis.settings(max_examples=8)
def test_equals_a_loop_over_tokens(data, choices, groups, size):
    """Covers experts without tokens, experts with all tokens, and tokens without an expert."""
    shape = (choices, groups, size)
    count = math.prod(shape)
    number = data.draw(st.lists(st.integers(0, E - 1), min_size=count, max_size=count))
    kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    expert_KGS, kept_KGS = np.reshape(number, shape), np.reshape(kept, shape)
    gate_KGS = np.where(kept_KGS, RNG.random(shape), 0).astype(np.float32)
    layer = Experts.params().set(model_dim=M, hidden_dim=H, num_experts=E).instantiate(path="e")
    theta = layer.init(1)
    x_GSM = RNG.normal(size=(groups, size, M)).astype(np.float32)
    y_GSM = run_experts(layer, theta, x_GSM, expert_KGS, gate_KGS, kept_KGS)
    w_in, w_out = theta.w_in.numpy(), theta.w_out.numpy()
    wanted = np.zeros(x_GSM.shape)
    for k, g, s in np.ndindex(shape):
        e = expert_KGS[k, g, s]
        hidden = np.maximum(x_GSM[g, s].astype(np.float64) @ w_in[e], 0)
        wanted[g, s] += gate_KGS[k, g, s] * (hidden @ w_out[e]) * kept_KGS[k, g, s]
    assert_close(y_GSM, wanted, "float32")


def run_experts(experts, theta, x_GSM, expert_KGS, gate_KGS, kept_KGS) -> tf.Tensor:
    positions = tf.zeros(x_GSM.shape[:2], tf.int32)
    assignments = tuple(
        Assignment(
            tf.cast(e, tf.int32), positions, g, tf.convert_to_tensor(k), tf.cast(k, tf.float32)
        )
        for e, g, k in zip(expert_KGS, gate_KGS, kept_KGS, strict=True)
    )
    routing = TokenChoiceRouting(assignments, E, x_GSM.shape[1])
    dispatch = DroplessDispatch.params().instantiate()
    return dispatch.run(routing, tf.convert_to_tensor(x_GSM), experts, theta, None)


X = RNG.normal(size=(1, 24, M)).astype(np.float32)
MASK = np.ones((1, 24), np.int32)


@pytest.mark.slow
def test_compiled_results_equal_eager_ones_also_in_bfloat16():
    layer = make(experts__use_bias=True)
    theta = weights_of(layer)
    compiled = tf.function(both_ways, jit_compile=True, autograph=False)
    exact = both_ways(layer, theta, X, MASK)
    check_equal(compiled(layer, theta, X, MASK), exact)
    rounded = both_ways(layer, theta, tf.cast(X, tf.bfloat16), MASK)
    assert rounded.output.dtype == tf.bfloat16
    exact = both_ways(layer, theta, tf.cast(tf.cast(X, tf.bfloat16), tf.float32), MASK)
    assert_close(tf.cast(rounded.output, tf.float32), exact.output, "bfloat16")
    assert_close(
        rounded.gradients.theta.experts.w_in, exact.gradients.theta.experts.w_in, "bfloat16"
    )


@pytest.mark.slow
def test_has_no_tensor_of_all_experts_and_slots():
    tokens, experts = 64, 16
    layer = make(experts=experts, group_size=tokens)
    theta = layer.init(1)
    step = tf.function(lambda x: both_ways(layer, theta, x, tf.ones([1, tokens])), jit_compile=True)
    text = step.experimental_get_compiler_ir(tf.zeros([1, tokens, M]))(stage="optimized_hlo")
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", text)
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    # The largest tensor is the one-hot choices [K,T,E]. There are no buffers [E,C] or [E,C,M].
    assert largest <= 2 * tokens * experts < experts * tokens * M


def test_no_slice_starts_at_a_data_dependent_position():
    """TensorFlow would evaluate the layers before such a slice at compile time."""
    layer = make()
    function = tf.function(functools.partial(both_ways, layer), autograph=False)
    graph = function.get_concrete_function(
        weights_of(layer), tf.zeros([2, 8, M]), tf.ones([2, 8])
    ).graph
    nodes = {
        f"{scope.signature.name}/{node.name}": node
        for scope in graph.as_graph_def().library.function
        for node in scope.node_def
    }
    slices = [name for name, node in nodes.items() if node.op in ("Slice", "StridedSlice")]
    for name in slices:
        scope = name.split("/")[0]
        begin = nodes[name].input[1].split(":")[0]
        assert nodes[f"{scope}/{begin}"].op == "Const", name


def test_expert_dropout_is_independent_for_every_row():
    """An expert gives equal outputs for equal tokens, except for dropout."""
    layer = make(experts=2, group_size=24, experts__dropout_rate=0.5, experts__use_bias=True)
    theta = weights_of(layer)
    x = np.ones((1, 24, M), np.float32)
    y = both_ways(layer, theta, x, MASK, training=True).output.numpy()[0]
    assert len(np.unique(y.round(5), axis=0)) > 12
    np.testing.assert_array_equal(y, both_ways(layer, theta, x, MASK, training=True).output[0])
    other = both_ways(layer, theta, x, MASK, training=True, seed=2).output[0]
    assert not np.array_equal(y, other)
    evaluated = both_ways(layer, theta, x, MASK).output.numpy()[0]
    np.testing.assert_allclose(evaluated, np.broadcast_to(evaluated[0], evaluated.shape), rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3])
def test_results_do_not_depend_on_the_number_of_tokens(tokens):
    layer = make(experts=8)
    theta = weights_of(layer)
    many = both_ways(layer, theta, X, MASK).output
    few = both_ways(layer, theta, X[:, :tokens], MASK[:, :tokens]).output
    assert_close(few, many[:, :tokens], "float32")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"router__capacity_factor": 2.0}, "moe.router.capacity_factor=2 .*dropless"),
        (
            {"router__evaluation_capacity_factor": 2.0},
            "moe.router.evaluation_capacity_factor=2 .*dropless",
        ),
        ({"exchange__chunks": 2}, "moe.exchange.chunks=2 .*moe.dispatch .DroplessDispatch."),
        (
            {"exchange__precision": "int8"},
            "moe.exchange.precision='int8' .*moe.dispatch .DroplessDispatch.",
        ),
    ],
)
def test_rejects_unsupported_options(values, message):
    with pytest.raises(ValueError, match=message):
        make(**values)


TOKENS = 8


def on_devices(layer, mesh: str, strategy: str, with_gradient=True):
    """Returns a function (weights, x) that runs on the mesh.

    It returns the output, the metrics and, optionally, the gradients.
    """
    specs = layer.variable_specs()

    def run(theta, x):
        theta, x = annotate_weights(theta, specs), annotate(x, "BLM")
        found = both_ways(layer, theta, x, tf.ones(x.shape[:2], tf.int32))
        if not with_gradient:
            return found.output, found.metrics
        return found

    return partition(run, mesh, strategy)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("data=8", "expert"),
        pytest.param("data=2,fsdp=2,model=2", "expert_fsdp_tensor", marks=pytest.mark.slow),
    ],
)
def test_many_devices_equal_one_device(mesh, strategy):
    layer = make(experts=8, experts__use_bias=True, experts__activation="swiglu")
    theta = weights_of(layer)
    x = RNG.normal(size=(8, TOKENS, M)).astype(np.float32)
    found = on_devices(layer, mesh, strategy)(theta, x)
    check_equal(found, both_ways(layer, theta, x, tf.ones(x.shape[:2], tf.int32)))


@pytest.mark.slow
def test_rows_are_exchanged_twice_in_each_direction():
    """The forward pass also exchanges row counts. The router's gradient needs an all-reduce."""
    layer = make(experts=8)
    shapes = (
        layer.variable_specs().transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype)),
        tf.TensorSpec((8, TOKENS, M)),
    )
    forward = on_devices(layer, "data=8", "expert", with_gradient=False).compile(*shapes)
    kinds = hlo.count_by_kind(forward.collectives())
    assert kinds["all-to-all"] == 3
    assert set(kinds) <= {"all-to-all", "all-reduce"}
    kinds = hlo.count_by_kind(on_devices(layer, "data=8", "expert").compile(*shapes).collectives())
    assert kinds["all-to-all"] == 5
    assert set(kinds) <= {"all-to-all", "all-reduce"}


@pytest.mark.parametrize(
    ("bound", "share"),
    [
        (1.0, 0.4),
        pytest.param(0.0, None, marks=pytest.mark.slow),
        pytest.param(8.0, 0.0, marks=pytest.mark.slow),
    ],
)
def test_rows_above_the_bound_are_dropped_and_counted(bound, share):
    """All tokens are equal, so all rows go to two of the eight devices."""
    layer = make(experts=8, dispatch__bound=bound)
    theta = weights_of(layer)
    x = np.ones((8, TOKENS, M), np.float32)
    output, metrics = on_devices(layer, "data=8", "expert", with_gradient=False)(theta, x)
    one_device = both_ways(layer, theta, x, tf.ones(x.shape[:2], tf.int32)).output
    if share is None:
        assert "moe/over_bound_share" not in metrics
    else:
        assert (float(metrics["moe/over_bound_share"]) > 0) == (share > 0)
        assert float(metrics["moe/over_bound_share"]) >= share
    taken = np.any(np.asarray(output), -1)
    if share:
        assert 0 < taken.mean() < 0.5
    else:
        assert_close(output, one_device, "order")


def make_stack(execution, dispatch="dropless", group_size=5) -> TransformerStack:
    moe = MixtureOfExperts.params().set(
        num_experts=E, group_size=group_size, dispatch=dispatch_params(dispatch)
    )
    moe.router.capacity_factor = 0.0 if dispatch == "dropless" else float(E)
    params = TransformerStack.params().set(
        model_dim=M, hidden_dim=H, num_heads=1, num_layers=2, moe=moe, moe_every=1,
        execution=execution,
    )  # fmt: skip
    return params.instantiate(path="stack")


@pytest.mark.parametrize("policy", ["products", pytest.param("full", marks=pytest.mark.slow)])
def test_works_in_loops_with_rematerialization(policy):
    results = []
    for dispatch in ("dropless", "gather"):
        stack = make_stack(loop(policy), dispatch)
        results.append(both_ways(stack, stack.init(1), X[:, :9], MASK[:, :9]))
    check_equal(*results)


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("execution", "policy"),
    [
        (loop, "products"),
        (sequential, "products"),
        _slow(loop, "none"),
        _slow(loop, "products_but_hidden"),
        _slow(loop, "full"),
        _slow(sequential, "products_but_hidden"),
        _slow(sequential, "full"),
    ],
)
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [("data=2", "expert"), _slow("data=2,model=2", "expert_sequence_tensor")],
)
def test_rematerialized_stacks_equal_one_device_on_a_mesh(execution, policy, mesh, strategy):
    """What the region of the forward pass computes is saved for the region of the gradient."""
    stack = make_stack(execution(policy), group_size=4)
    theta = stack.init(1)
    x = RNG.normal(size=(4, 8, M)).astype(np.float32)
    found = on_devices(stack, mesh, strategy)(theta, x)
    check_equal(found, both_ways(stack, theta, x, tf.ones(x.shape[:2], tf.int32)))


@pytest.mark.slow
def test_saved_shards_of_a_loop_stay_on_their_devices():
    """The gradient exchanges rows in two all-to-alls, and recomputes those of a remat policy."""
    for policy, exchanges in (("none", 5), ("products", 8)):
        stack = make_stack(loop(policy), group_size=4)
        theta = stack.variable_specs().transform(lambda s: tf.TensorSpec(s.shape, s.dtype))
        compiled = on_devices(stack, "data=4", "expert").compile(theta, tf.TensorSpec((4, 8, M)))
        assert compiled.full_replications() == []
        kinds = hlo.count_by_kind(compiled.collectives())
        assert kinds.pop("all-to-all") == exchanges
        assert set(kinds) <= {"all-reduce"}
