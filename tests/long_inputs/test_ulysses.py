# tests: wings/long_inputs/ulysses.py, layers/attention/kernel.py
"""Compares attention whose devices exchange positions for heads with one device."""

import numpy as np
import pytest

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from lingvo_gshard.wings.long_inputs.ulysses import UlyssesKernel
from tests.runtime.sharded.test_sequence_parallel import EVERYTHING, B, L, Ran, attention, inputs

OF_BLOCKS = BlockwiseKernel.params().set(block_size=4)
DROPOUT = {"dropout_rate": 0.4, "use_sinks": True}


def heads(inner: Params | None = None, **values) -> Params:
    """Returns attention with the kernel."""
    kernel = UlyssesKernel.params()
    return attention(**values, kernel=kernel.set(inner=inner) if inner else kernel)


def test_positions_are_exchanged_for_heads_and_back():
    """Queries, keys and values go one way, outputs the other; gradients do the opposite."""
    ran = Ran(heads(), "data=2,context=4", "data_context")
    ran.check(attention())
    found = ran.collectives()
    exchanges = [c.bytes for c in found if c.kind == "all-to-all"]
    # What each device has: its part of the positions of all heads.
    assert exchanges == [4 * (B // 2) * (L // 4) * 4 * 4] * 8
    # Every device reads the segments of whole rows, and gradients of weights are summed.
    (segments,) = (c.bytes for c in found if c.kind == "all-gather")
    assert segments == 4 * (B // 2) * L
    assert hlo.count_by_kind(found) == {"all-to-all": 8, "all-gather": 1, "all-reduce": 2}


def test_keys_have_fewer_heads_than_there_are_devices():
    ran = Ran(heads(**EVERYTHING), "context=2,model=2", "context_tensor")
    ran.check(attention(**EVERYTHING))
    # No device gathers keys or values.
    assert max(c.bytes for c in ran.collectives() if c.kind == "all-gather") == 4 * B * L


def test_one_device_computes_with_the_inner_kernel():
    Ran(heads(OF_BLOCKS, **EVERYTHING), "data=2", "data").check(attention(**EVERYTHING))


@pytest.mark.slow
@pytest.mark.parametrize("inner", [None, OF_BLOCKS], ids=["dense", "blocks"])
@pytest.mark.parametrize("values", [{"is_causal": False}, EVERYTHING, DROPOUT], ids=str)
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("context=4", "context"),
        ("data=4,context=2", "data_context"),
        ("context=2,model=2", "context_tensor"),
        ("data=2,context=2,model=2", "data_context_sequence_tensor"),
        ("model=4", "sequence"),
    ],
)
def test_every_strategy_equals_one_device(mesh, strategy, values, inner):
    Ran(heads(inner, **values), mesh, strategy).check(attention(**values))


def test_heads_that_do_not_divide_are_refused():
    layer = heads().instantiate(path="layer")

    def run(theta, x, segments):
        return layer.fprop(theta, x, layer.mask(segments))

    theta, given = layer.init(1).transform(np.asarray), inputs()
    message = (
        "layer.kernel: UlyssesKernel splits heads over 8 devices, and there are 4; .* any number"
    )
    with pytest.raises(ValueError, match=message):
        partition(run, "context=8", "context")(theta, given.x, given.segments)
