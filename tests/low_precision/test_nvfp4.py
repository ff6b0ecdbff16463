# tests: wings/low_precision/nvfp4.py, wings/low_precision/nvfp4_options.py
"""Compares products in NVFP4 with NumPy, on one device and on a mesh, and trains with them."""

from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.repetition import Iteration, Repetition
from lingvo_gshard.layers import products
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.sharding import annotate
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.fine_tuning.adapters import is_factor
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.low_precision import nvfp4
from lingvo_gshard.wings.low_precision.nvfp4 import HADAMARD, EachKey, Nvfp4
from lingvo_gshard.wings.low_precision.nvfp4_options import WideShares
from lingvo_gshard.wings.low_precision.rounding import BlockScales
from lingvo_gshard.wings.optimizers.local_updates import LocalUpdates
from tests.layers.stacks.executions import loop, pipeline, sequential
from tests.runtime import tiny_translation
from tests.training import lora_model

FP4, E4M3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
# Every number of a type of 4 bits, written out.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
EQUATIONS = [
    ("BLM,MH->BLH", (2, 21, 40), (40, 24)),
    ("BLND,NDM->BLM", (2, 16, 2, 20), (2, 20, 37)),
    ("EGCM,EMH->EGCH", (3, 2, 5, 33), (3, 33, 18)),
]


def drawn(*shapes, seed=0):
    """Returns arrays that are exact in bfloat16, of very different sizes."""
    rng = np.random.default_rng(seed)
    found = [rng.normal(size=s) * 2.0 ** rng.integers(-6, 3, s) for s in shapes]
    return [x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in found]


def by_loop(x, steps):
    """Returns values times scales of e4m3, and the tensor's scale, by a loop over blocks.

    Args:
      steps: the size of a block along each dimension.
    """
    one = np.float32(1)
    encode = np.float32(2688) / np.abs(x).max()
    decode, result = one / encode, np.zeros_like(x)
    counts = [-(-size // step) for size, step in zip(x.shape, steps, strict=True)]
    for index in np.ndindex(*counts):
        at = tuple(slice(i * s, (i + 1) * s) for i, s in zip(index, steps, strict=True))
        scale = np.abs(x[at]).max() * np.float32(1 / 6) * encode
        scale = min(scale, np.float32(448)).astype(E4M3).astype(np.float32)
        if scale:
            fitting = np.clip(x[at] * (one / (scale * decode)), -6, 6)
            result[at] = fitting.astype(FP4).astype(np.float32) * scale
    return result, decode


def along(x, layout, letter, transforms=False):
    """Returns x in NVFP4 with blocks along a letter, as float64."""
    axis = layout.index(letter)
    if transforms:
        padding = [(0, -size % 16 * (i == axis)) for i, size in enumerate(x.shape)]
        moved = np.moveaxis(np.pad(x, padding), axis, -1)
        mixed = moved.reshape(*moved.shape[:-1], -1, 16).astype(np.float64) @ HADAMARD
        x = np.moveaxis(mixed.reshape(moved.shape), -1, axis).astype(np.float32)
    values, scale = by_loop(x, [16 if i == axis else 1 for i in range(x.ndim)])
    return values.astype(np.float64) * scale


def squares(w, layout, summed):
    """Returns a weight in NVFP4 with blocks of 16 x 16, as float64."""
    others = [c for c in layout if c not in summed]
    axes = [max(layout.index(c) for c in letters) for letters in (summed, others)]
    values, scale = by_loop(w, [16 if i in axes else 1 for i in range(w.ndim)])
    return values.astype(np.float64) * scale


def expected(equation, x, w, dz):
    """Returns a product and both gradients, all rounded to the nearest, by NumPy alone."""
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    summed = [c for c in left if c in right and c not in output]
    of_x = [c for c in output if c in right and c not in left]
    of_w = [c for c in output if c in left and c not in right]
    weight, last = squares(w, right, summed), of_w[-1]
    return (
        np.einsum(equation, along(x, left, summed[-1]), weight),
        np.einsum(f"{output},{right}->{left}", along(dz, output, of_x[-1]), weight),
        np.einsum(
            f"{left},{output}->{right}", along(x, left, last, True), along(dz, output, last, True)
        ),
    )


def computed(equation, x, w, dz, seed=None, rounding=None, paths=("layer", None)):
    """Returns a product and both gradients by the rounding and its rule."""
    fields = {"rounding": rounding or Nvfp4(), "rules": (EachKey(),)}
    path, iteration = paths
    with (
        context.scope(True, None if seed is None else tf.constant(seed)),
        context.override(layer_path=path, iteration=iteration),
        context.override_extension(products.ProductContext, **fields),
        tf.GradientTape() as tape,
    ):
        tape.watch([x, w])
        z = products.multiply(equation, x, w)
    gradients: Any = tape.gradient(z, [x, w], dz)
    return z, *gradients


def arrays(equation, shape_x, shape_w):
    shape_z = np.einsum(equation, np.zeros(shape_x), np.zeros(shape_w)).shape
    return drawn(shape_x, shape_w, shape_z)


def test_numbers_are_those_of_ml_dtypes():
    numbers = np.concatenate([E2M1, -E2M1, np.linspace(-9, 9, 4001), drawn((4000,))[0]])
    numbers = numbers.astype(np.float32)
    for number, dtype in ((nvfp4._VALUE, FP4), (nvfp4._SCALE, E4M3)):
        bits = dict(zip((FP4, E4M3), (6, 448), strict=True))[dtype]
        theirs = np.clip(numbers * bits / 8, -bits, bits).astype(dtype).astype(np.float32)
        ours = nvfp4.rounded(tf.constant(numbers * bits / 8), number).numpy()
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("axes", [[2], [1], [0, 2]])
def test_two_levels_are_those_of_a_loop_in_every_bit(axes, is_compiled):
    (x,) = drawn((20, 3, 37))
    x[3, 1] = 0
    x[:16, 2, 16:32] *= 1e-8

    def compute(x):
        encode = 2688.0 / tf.reduce_max(tf.abs(x))
        values, blocks = nvfp4.two_levels(x, axes, encode, tf.float32)
        return values, blocks.values, blocks.scales, 1.0 / encode

    compute = tf.function(compute, jit_compile=True) if is_compiled else compute
    values, narrow, scales, decode = (t.numpy() for t in compute(tf.constant(x)))
    theirs, scale = by_loop(x, [16 if axis in axes else 1 for axis in range(3)])
    np.testing.assert_array_equal(values, theirs)
    assert decode == scale and set(np.abs(narrow).ravel()) <= set(E2M1)
    for axis in range(3):
        size = x.shape[axis]
        scales = np.repeat(scales, 16, axis).take(range(size), axis) if axis in axes else scales
    np.testing.assert_array_equal(narrow * scales, theirs)
    assert (values == values.astype(ml_dtypes.bfloat16)).all()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(("equation", "shape_x", "shape_w"), EQUATIONS)
def test_products_and_gradients_are_those_of_rounded_factors(
    equation, shape_x, shape_w, is_compiled
):
    values = arrays(equation, shape_x, shape_w)
    compute = tf.function(computed, jit_compile=True) if is_compiled else computed
    found = compute(equation, *map(tf.constant, values))
    exact = np.einsum(equation, *values[:2])
    for name, one, other in zip(
        ("product", "dx", "dw"), found, expected(equation, *values), strict=True
    ):
        scale = np.abs(other).max()
        # A number between two of e2m1 may be transformed by another order of its sum.
        np.testing.assert_allclose(
            one / scale, other / scale, atol=1e-5 if name != "dw" else 2e-2, err_msg=name
        )
        assert name != "dw" or np.abs(one / scale - other / scale).mean() < 1e-4
    assert 0.01 < np.abs(found[0] - exact).mean() / np.abs(exact).mean() < 0.3


def test_transformed_factors_have_the_exact_product(monkeypatch):
    np.testing.assert_allclose(HADAMARD @ HADAMARD.T, np.eye(16), atol=1e-6)
    assert set(np.abs(HADAMARD).ravel()) == {0.25} and len({*map(tuple, HADAMARD)}) == 16
    seen = []

    def unrounded(x, axes, encode, dtype, key=None):
        seen.append(x.shape)
        return tf.cast(x, tf.float32) * encode, None

    monkeypatch.setattr(nvfp4, "two_levels", unrounded)
    for equation, *shapes in EQUATIONS:
        x, w, dz = arrays(equation, *shapes)
        inputs, output = equation.split("->")
        left, right = inputs.split(",")
        *_, dw = computed(equation, *map(tf.constant, (x, w, dz)))
        exact = np.einsum(f"{left},{output}->{right}", x.astype(np.float64), dz)
        np.testing.assert_allclose(dw, exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max())
    # 21 positions were padded to 32.
    assert (2, 32, 40) in seen and (2, 32, 24) in seen


def test_gradients_are_rounded_by_chance_and_without_bias():
    """How often a number is rounded up is within six standard deviations of its place."""
    (x,) = drawn((4, 64))
    encode, rounds = np.float32(2688) / np.abs(x).max(), 400

    def compute(key=None):
        return nvfp4.two_levels(tf.constant(x), [1], tf.constant(encode), tf.float32, key)[1]

    compiled = tf.function(lambda key: compute(key).values, jit_compile=True)
    signed = np.array([compiled(tf.constant([7, step])) for step in range(rounds)])
    size = np.abs(x) * encode / np.repeat(compute().scales.numpy(), 16, 1)
    assert (size <= 6).mean() > 0.9
    size = np.minimum(size, 6)
    place = np.searchsorted(E2M1, size, side="right") - 1
    below, above = E2M1[place], E2M1[np.minimum(place + 1, 7)]
    assert ((np.abs(signed) == below) | (np.abs(signed) == above)).all()
    assert (signed * x >= 0).all()
    likely = np.where(above > below, (size - below) / np.where(above > below, above - below, 1), 1)
    found = (np.abs(signed) == above).mean(0)
    spread = np.sqrt(likely * (1 - likely) / rounds)
    assert (np.abs(found - likely) <= 6 * spread + 6 / rounds).all()
    # Rounding to the nearest would be far off.
    nearest = np.abs(compute().values.numpy()) == above
    assert np.abs(nearest - likely).mean() > 5 * np.abs(found - likely).mean()
    np.testing.assert_array_equal(compiled(tf.constant([7, 3])), signed[3])
    assert (signed[3] != signed[4]).mean() > 0.05


def test_only_gradients_are_random_and_each_product_has_its_own_numbers():
    equation, *shapes = EQUATIONS[0]
    values = [*map(tf.constant, arrays(equation, *shapes))]
    one, again, other = (computed(equation, *values, seed=s) for s in ([1, 2], [1, 2], [1, 3]))
    elsewhere = computed(equation, *values, seed=[1, 2], paths=("another", None))
    nearest = computed(equation, *values)
    for index, name in enumerate(("product", "dx", "dw")):
        np.testing.assert_array_equal(one[index], again[index])
        for each in (other, elsewhere, nearest):
            assert np.array_equal(one[index], each[index]) == (name == "product")


@pytest.mark.parametrize("strategy", ["data", "fsdp_tensor", "fsdp_sequence_tensor"])
def test_a_mesh_rounds_as_one_device(strategy):
    values = drawn((8, 16, 160), (160, 272), (8, 16, 272))
    values[0][5, 3, 7], values[1][150, 33], values[2][2, 2, 2] = 1e3, 70.0, 3e2

    def run(x, w, dz):
        z, dx, dw = computed("BLM,MH->BLH", x, w, dz, seed=[3, 1])
        return z, annotate(dx, "BLM"), annotate(dw, "MH", "weights")

    split = partition(run, "data=4,model=2", strategy, layouts=["BLM", "weights:MH", "BLH"])
    whole = tf.function(run, jit_compile=True)(*map(tf.constant, values))
    for one, other in zip(whole, split(*values), strict=True):
        scale = np.abs(one).max()
        np.testing.assert_allclose(np.asarray(other) / scale, one / scale, atol=2e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_overflow_is_not_hidden_and_zeros_stay(bad, is_compiled):
    x, w, dz = (np.ones(shape, np.float32) for shape in ((1, 4, 8), (8, 3), (1, 4, 3)))
    compute = tf.function(computed, jit_compile=True) if is_compiled else computed
    x[0, 1, 2] = bad
    z, dx, dw = compute("BLM,MH->BLH", *map(tf.constant, (x, w, dz)))
    assert not np.any(np.isfinite(z)) and not np.any(np.isfinite(dw)) and np.all(np.isfinite(dx))
    tiny = compute("BLM,MH->BLH", tf.zeros_like(x), tf.fill([8, 3], 1e-38), tf.zeros_like(dz))
    for result in tiny:
        np.testing.assert_array_equal(result, 0)


def test_rows_of_dropless_experts_are_those_of_blocks_of_8_bits():
    rounding = rounding_of(trainer())
    for path, expected in (("encoder.layers[1].x", True), ("encoder.layers[0].x", False)):
        with context.override(layer_path=path):
            by_rows = rounding.by_rows
        assert by_rows == (BlockScales(rounds_weight_gradients=False) if expected else None)


def trainer(execution=None, first=0.5, last=0.0, stack=None, **values):
    """Returns a trainer of two layers on each side, the first in bfloat16."""
    stack = {"moe_every": 0, "execution": execution or sequential(), **(stack or {})}
    shares = WideShares.params().set(first_share=first, last_share=last)
    values = {"precision": "nvfp4", "nvfp4": shares, **values}
    return tiny_translation.trainer(stack_values=stack, **values)


def rounding_of(made) -> Nvfp4:
    """Returns the rounding of a trainer."""
    return cast(Nvfp4, made.precision.rounding)


def test_shares_of_layers_stay_in_bfloat16():
    made = trainer(first=0.5, last=0.0)
    layers = rounding_of(made).layers
    for path, is_wide in (
        ("encoder.layers[0].self_attention", True),
        ("encoder.layers[1].feed_forward", False),
        ("decoder.layers[0]", True),
        ("decoder", False),
    ):
        with context.override(layer_path=path):
            assert layers.has_current() is is_wide
            assert (rounding_of(made).here is None) is is_wide
    repetition = Repetition("encoder.layers", 1, 2)
    found = []
    for index in range(2):
        iteration = Iteration(repetition, tf.constant(index))
        with context.override(layer_path="encoder.layers.body[0].x", iteration=iteration):
            found.append(bool(layers.has_current()))
    assert found == [True, False]
    many = trainer(stack={"num_layers": 10, "sequential_first": 1}, first=0.2, last=0.3)
    names = [f"encoder.{n}" for n in ["first_layers[0]", *(f"layers[{i}]" for i in range(9))]]
    found = []
    for name in names:
        with context.override(layer_path=name):
            found.append(rounding_of(many).layers.has_current())
    assert found == [True] * 2 + [False] * 5 + [True] * 3
    for defaults, count in ((2, 0), (4, 1), (62, 10)):
        stack = {"num_layers": defaults}
        layers = rounding_of(trainer(stack=stack, first=0.03, last=0.13)).layers
        assert len(layers._paths) == 2 * count


def test_a_layer_in_bfloat16_has_the_products_of_bfloat16():
    equation, *shapes = EQUATIONS[0]
    values = [*map(tf.constant, arrays(equation, *shapes))]
    rounding = rounding_of(trainer())
    exact = [np.einsum(e, *(values[i] for i in at)) for e, at in (
        (equation, (0, 1)), ("BLH,MH->BLM", (2, 1)), ("BLM,BLH->MH", (0, 2)))]  # fmt: skip
    repetition = Repetition("encoder.layers", 1, 2)
    for index, is_wide in ((0, True), (1, False)):
        iteration = Iteration(repetition, tf.constant(index))
        for path, own in (
            (f"encoder.layers[{index}]", None),
            ("encoder.layers.body[0]", iteration),
        ):
            found = computed(equation, *values, seed=[1, 2], rounding=rounding, paths=(path, own))
            for one, other in zip(found, exact, strict=True):
                is_close = np.abs(one - other).max() < 1e-5 * np.abs(other).max()
                assert is_close == is_wide, path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precision": "fp8"}, "step.nvfp4.first_share is 0.5, but step.precision is 'fp8'"),
        ({"first": 0.6, "last": 0.5}, "step.nvfp4.last_share 0.5; 1 or less together"),
    ],
)
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        trainer(**values)
    with pytest.raises(UserError, match="first_share is 1.5"):
        WideShares.params().set(first_share=1.5)


def test_adapters_stay_in_bfloat16_and_learn_beside_products_in_4_bits():
    """The first step changes the second factors alone, as without a rounding."""
    states = []
    for precision in ("nvfp4", "bfloat16"):
        made = Trainer.params().set(precision=precision).instantiate(lora_model.task_params())
        first = made.init_state()
        second, metrics = tf.function(made.train_step, autograph=False)(first, lora_model.batch())
        states.append([*zip(first.theta.flatten_items(), second.theta.flatten(), strict=True)])
        assert np.isfinite(metrics.loss)
    for found in zip(*states, strict=True):
        moved = {bool(np.any(np.asarray(old[1]) != np.asarray(new))) for old, new in found}
        assert moved == {is_factor(found[0][0][0]) and found[0][0][0].endswith("_b")}


def stepped(made, steps=3):
    """Returns the losses of a run on one batch."""
    runtime = SingleDeviceRuntime(made)
    runtime.init_state()
    batch = tiny_translation.batch(0)
    return [runtime.train_step(batch).read()["loss"] for _ in range(steps)]


@pytest.fixture(scope="module")
def losses():
    return stepped(trainer(stack={"residual_dropout_rate": 0.0}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "tolerance"),
    [
        # In bfloat16 these losses differ by up to 2e-3, since XLA rounds elsewhere.
        ({"execution": sequential("full")}, 1e-2),
        ({"execution": loop("full")}, 1e-2),
        ({"execution": loop("products")}, 1e-2),
        ({"execution": pipeline(2, micro_batches=2)}, 2e-2),
        ({"micro_batches": 2}, 2e-2),
    ],
    ids=["remat", "loop", "loop_products", "pipeline", "micro_batches"],
)
def test_each_way_of_executing_a_step_trains_alike(values, tolerance, losses):
    found = stepped(trainer(stack={"residual_dropout_rate": 0.0}, **values))
    np.testing.assert_allclose(found, losses, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"stack": {"moe_every": 2}},
        {"stack": {"moe_every": 1, "moe.dispatch": DroplessDispatch.params()}},
        {"local_updates": LocalUpdates.params().set(every=2)},
    ],
    ids=["capacity", "dropless", "local_updates"],
)
def test_experts_and_workers_learn(values):
    found = stepped(trainer(**values), 8)
    assert np.isfinite(found).all() and found[-1] < found[0] - 0.1
