# tests: wings/planning/programs/planned.py, wings/planning/programs/stated.py
# tests: wings/planning/compiling/compiler_process.py
"""Plans a U-Net of plain jax to its end, on TPUs and GPUs that are not there."""

import time

import jax
import pytest

import lingvo_gshard
from lingvo_gshard.wings.planning.compiling import compiler_process
from lingvo_gshard.wings.planning.machines import cuda
from tests.planning.programs import unet

# The first and the last convolution, five in each of nine blocks less the norms, and the changes of
# size.
CONVOLUTIONS = 2 + 9 * 3 + 2 * len(unet.WIDTHS)


def planned(topology, **sizes):
    started = time.monotonic()
    jitted = jax.jit(unet.step, donate_argnums=0)
    plan = lingvo_gshard.plan(jitted, unet.specs(**sizes), topology)
    return plan, time.monotonic() - started


def test_all_products_are_counted_and_none_twice():
    plan, _ = planned("cpu:4")
    assert CONVOLUTIONS == 37
    assert plan.flops.useful == plan.flops.executed and plan.flops.padding == 0
    assert plan.parameters.total * 2 == plan.bytes_per_device.weights
    assert plan.bytes_per_device.moments == 2 * plan.bytes_per_device.weights


@pytest.mark.slow
def test_a_unet_is_planned_for_tpus(monkeypatch):
    pytest.importorskip("libtpu")
    plan, seconds = planned("v5e:2x2")
    assert seconds < 120 and plan.compiler == "tpu" and plan.fits
    assert plan.flops.useful == pytest.approx(planned("cpu:4")[0].flops.useful, rel=0.02)
    # Of a step that nearly fills the memory, the code is generated. That takes minutes, and is
    # given up.
    monkeypatch.setattr(compiler_process, "_SHARE_FOR_CODE", 1.0)
    monkeypatch.setattr(compiler_process, "_MOST_CODE_SECONDS", 1.0)
    plan, seconds = planned("v5e:2x2", size=256)
    assert seconds < 120 and not plan.has_code
    assert any("had not generated the code after 1 s" in note for note in plan.notes)


@pytest.mark.slow
@pytest.mark.skipif(cuda.installed() is None, reason=cuda.MISSING)
def test_a_unet_is_planned_for_gpus():
    plan, seconds = planned("gpu:h100:1x4")
    assert seconds < 120 and plan.compiler == "gpu"
    # cuDNN computes gradients by strides as products of arrays with zeros between the data.
    useful = planned("cpu:4")[0].flops.useful
    assert useful <= plan.flops.executed < 1.5 * useful
