# tests: wings/hlo/kernels.py, wings/hlo/kernel_body.py, wings/hlo/reader.py
"""Plans steps with kernels that jax ships, compiled for TPUs and GPUs that are not there."""

import jax
import pytest

import lingvo_gshard
from lingvo_gshard.wings.planning.machines import chips, cuda
from tests.planning.programs import kernels_of_jax as kernels

pytestmark = pytest.mark.slow
needs_cuda = pytest.mark.skipif(cuda.installed() is None, reason=cuda.MISSING)


def planned(function, specs, topology):
    return lingvo_gshard.plan(jax.jit(function), specs, topology)


def test_splash_attention_counts_the_blocks_of_its_mask():
    pytest.importorskip("libtpu")
    plan = planned(kernels.splash_step, kernels.splash_specs(), "v5e:2x2")
    products = 2 + 4 + 3
    expected = products * kernels.BATCH // 4 * kernels.causal_product()
    assert plan.flops.executed == plan.flops.useful == expected
    assert not [note for note in plan.notes if "kernel" in note]


def test_grouped_products_are_not_planned_below_the_peak():
    pytest.importorskip("libtpu")
    plan = planned(kernels.grouped_step, kernels.grouped_specs(), "v5e:1x1")
    flops = 2 * 2 * kernels.ROWS * kernels.INNER * kernels.OUTER
    assert plan.flops.executed == flops
    assert plan.seconds_per_step > flops / chips.get("v5e").peak("bf16")
    assert any("FLOPs that it declares as its cost" in note for note in plan.notes)


@needs_cuda
def test_attention_of_triton_counts_the_keys_that_queries_see():
    plan = planned(kernels.triton_step, kernels.triton_specs(), "gpu:h100:1x1")
    assert plan.flops.executed == 2 * kernels.BATCH * kernels.causal_product()


@pytest.mark.parametrize("topology", ["v5e:1x1", pytest.param("gpu:h100:1x1", marks=needs_cuda)])
def test_conditions_on_the_position_in_a_grid_are_evaluated(topology):
    if topology.startswith("v5e"):
        pytest.importorskip("libtpu")
    step, specs = kernels.skipped_products("tpu" if topology.startswith("v5e") else "cuda")
    plan = planned(step, specs, topology)
    assert plan.flops.executed == (1 + 2 + 3 + 3) * 2 * 128**3
