# tests: wings/planning/programs/stated.py, wings/hlo/kernels.py, wings/hlo/kernel_body.py
# tests: wings/hlo/costs.py
"""Compares the products that jax programs state, those of kernels too, with closed forms."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import lingvo_gshard
from lingvo_gshard.wings.planning.programs.exported_function import export
from lingvo_gshard.wings.planning.programs.jax_program import to_program
from lingvo_gshard.wings.planning.programs.stated import stated_flops
from tests.planning.programs import kernels_of_jax as kernels

MESH = AbstractMesh((4, 2), ("data", "model"))
PRODUCT = 2 * 32 * 64 * 64


def spec(shape, *axes):
    sharding = NamedSharding(MESH, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def stated(function, specs, platform="tpu", **kernel_flops):
    program = to_program(export(function, specs, platform), "step", platform)
    return stated_flops(program, kernel_flops)


def layers(weights, x):
    """Applies six layers in a loop, and computes their products once more for the gradients."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    y, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
    return jnp.sum(y**2)


def test_products_in_loops_count_for_each_iteration_and_recomputed_ones_do_not():
    specs = spec((6, 64, 64), None, None, "model"), spec((32, 64), "data")
    assert stated(layers, specs) == 6 * PRODUCT
    assert stated(jax.grad(layers), specs) == 3 * 6 * PRODUCT


def test_branches_count_as_the_longest():
    def step(x, w):
        return jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x)

    assert stated(step, (spec((32, 64)), spec((64, 64)))) == 2 * PRODUCT


def test_loops_of_unknown_length_are_unknown():
    def step(x, w):
        return jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ w, x)

    assert stated(step, (spec((32, 64)), spec((64, 64)))) is None


def test_regions_of_one_device_count_for_the_devices_that_differ():
    def step(x, w):
        rows = PartitionSpec("data")
        mapped = jax.shard_map(
            lambda x, w: x @ w, mesh=MESH, in_specs=(rows, PartitionSpec()), out_specs=rows
        )
        return mapped(x, w)

    assert stated(step, (spec((32, 64), "data"), spec((64, 64)))) == PRODUCT


def test_convolutions_count_the_taps_that_meet_data():
    def step(x, w):
        options = {"window_strides": (2, 2), "padding": "SAME"}
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, **options, dimension_numbers=numbers)

    # Windows of 3 positions with a stride of 2 begin at 0, 2, 4, 6: the last meets 2 of 8.
    taps = 3 + 3 + 3 + 2
    assert stated(step, (spec((4, 8, 8, 5)), spec((3, 3, 5, 7)))) == 2 * 4 * taps**2 * 5 * 7


def test_products_of_every_device_are_not_useful():
    def step(x, w, v):
        return (x @ w).sum() + (v @ v).sum()

    specs = spec((32, 64), "data"), spec((64, 64), None, "model"), spec((64, 64))
    plan = lingvo_gshard.plan(jax.jit(step), specs, "cpu:8")
    whole = 2 * 64**3
    assert plan.flops.executed == PRODUCT // 8 + whole
    assert plan.flops.useful == (PRODUCT + whole) // 8
    assert plan.flops.padding == plan.flops.executed - plan.flops.useful
    assert any("computed by several devices alike" in note for note in plan.notes)


def test_blocks_that_splash_attention_skips_do_not_count():
    products = 2 + 4 + 3
    found = stated(kernels.splash_step, kernels.splash_specs())
    attention = products * kernels.BATCH * kernels.causal_product()
    # The sums of the outputs by their gradients, which the backward pass needs.
    sums = 2 * kernels.BATCH * kernels.HEADS * kernels.LENGTH * kernels.DIM
    assert found in (attention, attention + sums)


def test_grouped_products_count_as_they_declare():
    product = 2 * kernels.ROWS * kernels.INNER * kernels.OUTER
    assert stated(kernels.grouped_step, kernels.grouped_specs()) == 2 * product


def test_grouped_products_of_jax_count_once_for_each_row():
    def step(rows, weights, sizes):
        def loss(rows, weights):
            return jax.lax.ragged_dot(rows, weights, sizes).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(rows, weights)

    product = 2 * kernels.ROWS * kernels.INNER * kernels.OUTER
    assert stated(step, kernels.grouped_specs()) == 2 * product


def test_attention_of_triton_counts_the_keys_that_queries_see():
    found = stated(kernels.triton_step, kernels.triton_specs(), "cuda")
    assert found == 2 * kernels.BATCH * kernels.causal_product()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_conditions_on_the_position_in_a_grid_are_evaluated(platform):
    step, specs = kernels.skipped_products(platform)
    cells = 1 + 2 + 3 + 3
    assert stated(step, specs, platform) == cells * 2 * 128**3


def test_a_user_says_what_an_unknown_kernel_computes():
    specs = (kernels.spec((64, 64), mesh=(1,)),)
    product = 2 * 64**3
    assert stated(kernels.opaque_step, specs) == product
    assert stated(kernels.opaque_step, specs, my_products=1e9) == product + 10**9
