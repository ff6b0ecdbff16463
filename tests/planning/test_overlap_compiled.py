# tests: runtime/compile_options.py, wings/planning/overlap.py
"""Compiles a step for TPUs and GPUs with and without the options that overlap communication."""

import functools

import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.runtime.compile_options import NONE, chosen_for
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import Partitioned
from lingvo_gshard.wings.planning import overlap, roofline
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.machines import compilers, cuda, topologies

pytestmark = pytest.mark.slow

MESH = "data=8"
B, M, H, LAYERS = 65536, 2048, 8192, 3
needs_libtpu = pytest.mark.skipif(compilers.installed() is None, reason="libtpu is missing")
needs_cuda = pytest.mark.skipif(cuda.installed() is None, reason="XLA's GPU compiler is missing")


def step(x_BM, *weights):
    """Returns the gradients of layers whose weights are split, so that each is gathered."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        for w_MH, w_HM in zip(weights[::2], weights[1::2], strict=True):
            x_BM = tf.nn.relu(x_BM @ w_MH) @ w_HM
        loss = tf.reduce_sum(tf.cast(x_BM, tf.float32) ** 2)
    return tape.gradient(loss, weights)


@functools.cache
def program(topology: str):
    devices = topologies.get(topology).compile_devices()
    layouts = ["BM", *["weights:MH", "weights:HM"] * LAYERS]
    partitioned = Partitioned(step, Partitioning.make(MESH, "fsdp"), devices, layouts)
    shapes = [(B, M), *[(M, H), (H, M)] * LAYERS]
    return partitioned.lower(*(tf.TensorSpec(shape, tf.bfloat16) for shape in shapes))


def communication(topology: str, *given: str):
    """Returns the seconds of communication that computation hides, and the exposed seconds."""
    machine = topologies.get(topology)
    options = chosen_for(machine.compile_devices()[0], given)
    compiled = compilation.compile_for(program(topology), machine, options=options)
    operations = hlo.read_operations(compiled.module, Mesh.parse(MESH)).operations
    timed = overlap.hide(roofline.time_operations(operations, machine, Mesh.parse(MESH)))
    found = [each for each in timed if each.operation.collective]
    return sum(each.hidden_seconds for each in found), sum(each.seconds for each in found)


@needs_libtpu
def test_tpus_hide_communication_with_the_options_and_none_without():
    hidden, exposed = communication("v3:2x2")
    assert hidden > 0.1 * exposed
    assert communication("v3:2x2", NONE)[0] == 0


@needs_libtpu
def test_tpus_with_asynchronous_permutes_expose_less_with_the_options():
    """libtpu makes rings of permutes by default, which hide less than gathers."""
    assert communication("v5p:2x2x2")[1] < communication("v5p:2x2x2", NONE)[1]


@needs_libtpu
def test_all_options_are_accepted_by_all_tpus():
    for topology in ("v2:2x2", "v3:2x2", "v4:2x2x2", "v5e:2x4", "v6e:2x4", "tpu7x:2x2x1"):
        communication(topology)


@needs_cuda
@pytest.mark.parametrize("given", [(), (NONE,)])
def test_gpus_hide_communication(given):
    """XLA schedules for latency on H100 by itself, too."""
    assert communication("gpu:h100:1x8", *given)[0] > 0


@needs_libtpu
def test_a_plan_names_an_option_that_the_compiler_refuses():
    with pytest.raises(UserError, match="`compile_options=xla_tpu_unknown=True`: the installed"):
        communication("v5p:2x2x2", "xla_tpu_unknown=true")
