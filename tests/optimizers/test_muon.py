# tests: wings/optimizers/muon.py, wings/optimizers/orthogonalization.py
"""Compares Muon with the formulas of its papers, in NumPy and float64."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import MATRIX, SCALE, TABLE, VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.wings.optimizers.muon import Muon
from lingvo_gshard.wings.optimizers.orthogonalization import matrices_of, orthogonalize
from tests.training.optim import one_weight

EPSILON = 1e-7


def make_spec(layout, shape, inputs="", layers=(), role="", path="w") -> VariableSpec:
    zeros = initializers.constant(0.0)
    names = tuple(f"layers[{index}].w" for index in range(int(np.prod(layers)))) if layers else ()
    return VariableSpec(
        path, layout, shape, "float32", zeros, inputs=inputs, slices=names, role=role
    )


def draw(shape, steps=6):
    """Returns a weight, its gradients and the learning rates of as many steps."""
    generator = np.random.default_rng(3)
    start = generator.normal(size=shape).astype(np.float32)
    gradients = generator.normal(size=(steps, *shape)).astype(np.float32)
    return start, gradients, np.linspace(0.1, 0.02, steps).astype(np.float32)


def newton_schulz(g):
    """Five iterations of Jordan et al. for one matrix."""
    x = g / (np.linalg.norm(g) + EPSILON)
    x = x.T if len(g) > len(g[0]) else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if len(g) > len(g[0]) else x


def numpy_muon(w, gradients, rates, beta, decay, nesterov, scale):
    """Equations 1 and 4 of arXiv 2502.16982, which sum gradients without the factor 1 - beta."""
    w = w.astype(np.float64)
    m = np.zeros_like(w)
    for g, rate in zip(gradients.astype(np.float64), rates, strict=True):
        m = beta * m + g
        d = (g + beta * m if nesterov else m) * (1 - beta)
        w = w - rate * (scale * newton_schulz(d) + decay * w)
    return w, (1 - beta) * m


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("layout", "shape", "scale", "factor"),
    [
        ("MH", (8, 24), "match_rms_adamw", 0.2 * np.sqrt(24)),
        ("HM", (24, 8), "match_rms_adamw", 0.2 * np.sqrt(24)),
        ("MH", (8, 24), "original", np.sqrt(3)),
        ("HM", (24, 8), "original", 1.0),
        ("MM", (8, 8), "original", 1.0),
    ],
)
def test_follows_the_recurrence(layout, shape, scale, factor, nesterov):
    layout = layout.replace("MM", "Mm")
    start, gradients, rates = draw(shape)
    params = Muon.params().set(
        beta=0.9, weight_decay=0.3, nesterov=nesterov, update_scale=scale, products_dtype="float32"
    )
    spec = make_spec(layout, shape, layout[:1])
    weight, moments = one_weight.train(params.instantiate(), spec, start, gradients, rates)
    w, m = numpy_muon(start, gradients, rates, 0.9, 0.3, nesterov, factor)
    np.testing.assert_allclose(weight, w, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(moments.first_moment, m, rtol=1e-5, atol=1e-6)
    assert list(moments) == ["first_moment"]


def orthogonal(spec, x, per_head=False, dtype="float32"):
    matrices = matrices_of(spec, per_head)
    assert matrices is not None
    return orthogonalize(tf.convert_to_tensor(x), matrices, 5, EPSILON, dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.05)])
@pytest.mark.parametrize("shape", [(32, 128), (128, 32)])
def test_singular_values_become_about_one_and_their_vectors_stay(shape, dtype, tolerance):
    x = 1e-3 * np.random.default_rng(0).normal(size=shape).astype(np.float32)
    left, _, right = np.linalg.svd(x, full_matrices=False)
    # Outside of programs, CPUs with instructions for bfloat16 round partial sums.
    compiled = tf.function(orthogonal, jit_compile=True)
    found = compiled(make_spec("MH", shape), x, dtype=dtype).numpy()
    between = left.T @ found @ right.T
    values = np.diag(between)
    assert 0.68 - tolerance < values.min() and values.max() < 1.2 + tolerance
    np.testing.assert_allclose(between - np.diag(values), 0.0, atol=tolerance)


def by_hand(x, spec, per_head):
    """Orthogonalizes each matrix of a weight, with N and D merged."""
    side = {"MND": 1, "qND": 1, "NDM": 2, "MH": 1, "HM": 1, "ME": 1}
    own = spec.layout.lstrip("PREU")
    batch = spec.shape[: len(spec.shape) - len(own)]
    result = np.empty(x.shape)
    for index in np.ndindex(*batch):
        matrix = x[index].astype(np.float64)
        if per_head and own.endswith("ND"):
            for head in range(matrix.shape[1]):
                result[(*index, slice(None), head)] = newton_schulz(matrix[:, head])
        else:
            rows = int(np.prod(matrix.shape[: side[own]]))
            result[index] = newton_schulz(matrix.reshape(rows, -1)).reshape(matrix.shape)
    return result


WEIGHTS = [
    make_spec("EMH", (3, 8, 16), "M"),
    make_spec("EHM", (3, 16, 8), "H"),
    make_spec("ME", (8, 4)),
    make_spec("MND", (8, 2, 4), "M"),
    make_spec("MND", (24, 2, 4), "M"),
    make_spec("NDM", (2, 4, 24), "ND"),
    make_spec("RMH", (3, 8, 16), "M", (3,)),
    make_spec("RMND", (3, 8, 2, 4), "M", (3,)),
    make_spec("REHM", (3, 2, 16, 8), "H", (3,)),
    make_spec("PRMH", (2, 3, 8, 16), "M", (2, 3)),
]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("spec", WEIGHTS, ids=lambda spec: spec.layout)
def test_each_matrix_of_a_weight_is_orthogonalized_alone(spec, per_head):
    x = np.random.default_rng(1).normal(size=spec.shape).astype(np.float32)
    expected = by_hand(x, spec, per_head)
    np.testing.assert_allclose(orthogonal(spec, x, per_head), expected, atol=2e-4)
    compiled = tf.function(orthogonal, jit_compile=True, autograph=False)
    np.testing.assert_allclose(compiled(spec, tf.constant(x), per_head), expected, atol=2e-4)


LAYERS = {
    "experts": Experts.params().set(num_experts=3, hidden_dim=12, activation="swiglu"),
    "dense": FeedForward.params().set(hidden_dim=12, activation="swiglu", use_bias=False),
    "attention": SelfAttention.params().set(num_heads=2, num_key_value_heads=1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gates_experts_and_projections_of_layers_are_matrices_of_their_own(name):
    """Each product with an input has a weight of its own, so nothing packed must be split."""
    layer = LAYERS[name].copy().set(model_dim=8).instantiate(path=name)
    specs, theta = layer.variable_specs(), layer.init(1)
    generator = np.random.default_rng(2)
    gradients = theta.transform(lambda w: tf.constant(generator.normal(size=w.shape), tf.float32))
    muon = Muon.params().set(beta=0.0, nesterov=False, products_dtype="float32").instantiate()
    moments = muon.moment_specs(specs).transform(lambda spec: tf.zeros(spec.shape))
    step, rate = tf.constant(0), tf.constant(0.1)
    found, _ = muon.update(specs, theta, gradients, moments, step, rate)
    names = {"experts": {"w_in", "w_factor", "w_out"}, "dense": {"w_in", "w_factor", "w_out"}}
    expected_names = names.get(name, {"w_query", "w_key", "w_value", "w_out"})
    assert {path for path, _ in specs.flatten_items()} == expected_names
    for path, spec in specs.flatten_items():
        own = spec.layout.lstrip("E")
        direction = by_hand(gradients[path].numpy(), spec, per_head=False)
        sizes = spec.shape[len(spec.layout) - len(own) :]
        split = 2 if own.startswith("N") else 1
        longest = max(np.prod(sizes[:split]), np.prod(sizes[split:]))
        expected = theta[path] - 0.1 * 0.2 * np.sqrt(longest) * direction
        np.testing.assert_allclose(found[path], expected, atol=1e-4, err_msg=path)


def test_zeros_stay_zeros():
    spec = make_spec("EMH", (2, 4, 8), "M")
    x = np.zeros(spec.shape, np.float32)
    x[1] = np.random.default_rng(0).normal(size=x[1].shape)
    found = orthogonal(spec, x).numpy()
    assert not found[0].any() and np.abs(found[1]).max() > 0.1


OTHERS = [
    make_spec("H", (8,)),
    make_spec("EH", (2, 8)),
    make_spec("VM", (16, 8), role=TABLE),
    make_spec("MV", (8, 16), "M"),
    make_spec("zV", (2, 16), role=MATRIX),
    make_spec("ND", (2, 4), role=SCALE),
    make_spec("bN", (8, 2), role="bias"),
    make_spec("M", (8,), role=MATRIX),
    make_spec("ND", (2, 4), role=MATRIX),
]


@pytest.mark.parametrize("spec", OTHERS, ids=lambda spec: f"{spec.layout} {spec.role}")
def test_adamw_updates_what_is_no_matrix(spec):
    start, gradients, rates = draw(spec.shape)
    options = {"weight_decay": 0.1, "moment_dtype": "float32"}
    muon = Muon.params().set(adam_learning_rate_factor=0.5, **options).instantiate()
    adam = Adam.params().set(beta1=0.9, beta2=0.95, epsilon=1e-8, **options).instantiate()
    found = one_weight.train(muon, spec, start, gradients, rates)
    expected = one_weight.train(adam, spec, start, gradients, 0.5 * rates)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


def test_patterns_give_matrices_to_adamw():
    specs = NestedMap(w=make_spec("MH", (8, 16), "M", path="router.w"))
    muon = Muon.params().set(adam_weights=("router",), moment_dtype="int8").instantiate()
    muon.check(specs)
    layouts = {name: spec.layout for name, spec in muon.moment_specs(specs).w.items()}
    assert layouts == {
        "first_moment": "MH",
        "first_moment_scale": "M",
        "second_moment": "MH",
        "second_moment_scale": "M",
    }
    muon = Muon.params().set(adam_weights=("rooter",)).instantiate()
    with pytest.raises(ValueError, match=r"adam_weights: no layer or weight is named 'rooter'"):
        muon.check(specs)


def test_a_matrix_of_three_dimensions_needs_inputs():
    spec = make_spec("Mab", (4, 2, 3))
    assert matrices_of(spec) is None
    matrices = matrices_of(dataclasses.replace(spec, inputs="M"))
    assert matrices is not None and (matrices.inputs, matrices.outputs) == ("M", "ab")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"update_scale": "orginal"}, "update_scale is 'orginal'; expected 'match_rms_adamw' or"),
        ({"products_dtype": "float16"}, "products_dtype is 'float16'; expected"),
    ],
)
def test_invalid_values_name_their_path(values, message):
    with pytest.raises(ValueError, match=message):
        Muon(Muon.params().set(**values))
