# tests: wings/kernels/attention_cuda.py, wings/kernels/attention_tpu.py
# tests: wings/kernels/attention_triton.py, wings/kernels/attention_cudnn.py
"""Checks attention that the compilers of TPUs and GPUs have compiled, without the hardware."""

import pathlib
import subprocess
import sys

import msgspec
import pytest

from lingvo_gshard.wings.planning.machines import compilers, topologies
from tests.kernels.compiled_attention import MASKS, STRATEGIES, Facts
from tests.kernels.programs import GPUS, TPUS

ROOT = pathlib.Path(__file__).resolve().parents[2]

# One call forward and one backward.
SPLASH = ("tpu_custom_call",) * 2
CUDNN = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
# One call forward, and one for each of the gradients of queries, and of keys and values.
TRITON = ("__gpu$xla.gpu.triton",) * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TPUS, *GPUS])
def test_compiled_attention_has_kernels_no_scores_and_no_more_collectives(name):
    kind = topologies.get(name).chip.kind
    if compilers.available(kind) != kind:
        pytest.skip(f"the compiler for {kind} is not installed")
    command = [sys.executable, "-m", "tests.kernels.compiled_attention", name]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    found = msgspec.json.decode(result.stdout, type=dict[str, tuple[Facts, Facts]])
    assert len(found) == len(STRATEGIES) * len(MASKS[kind])
    for case, (fused, dense) in found.items():
        calls = SPLASH if kind == "tpu" else TRITON
        if kind == "gpu" and case.endswith("/causal"):
            calls = CUDNN
        if case.endswith(("/segments", "/windowed")) and "a100" not in name:
            # cuDNN finds segments by their offsets from Hopper on.
            calls = CUDNN
        assert fused.calls == calls, case
        assert fused.scores == () and dense.scores and not dense.calls, case
        if case.endswith("/biased"):
            # In place of the gradient of all biases [N,L,K], devices sum that of the table.
            assert sum(n for _, n in fused.collectives) < sum(n for _, n in dense.collectives)
            assert len(fused.collectives) == len(dense.collectives), case
        else:
            assert fused.collectives == dense.collectives, case
        assert {kind for kind, _ in fused.collectives} == {"all-reduce"}, case
