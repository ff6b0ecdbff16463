"""Compares memory by class with XLA's own analysis and with the shapes of inputs."""

import dataclasses

import pytest
import tensorflow as tf

from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.functions.partition import Partitioned
from lingvo_gshard.wings.planning import memory
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.plan.plan import TemporaryRow
from tests.hlo.parsing import parse_module

ROWS, WIDTH, HIDDEN = 64, 24, 40
CLASSES = (memory.INPUTS, memory.WEIGHTS, memory.MOMENTS)


def compiled(topology: str, donate=()):
    """Compiles a step of gradient descent with momentum on one weight."""
    machine = topologies.get(topology)

    def step(x_BM, w_MH, moment_MH):
        h_BH = annotate(x_BM @ w_MH, "BH")
        moment_MH = 0.9 * moment_MH + tf.matmul(x_BM, tf.nn.softmax(h_BH), transpose_a=True)
        return w_MH - moment_MH, moment_MH, tf.reduce_sum(h_BH)

    partitioning = Partitioning.make("data=4,model=2", "data_tensor")
    layouts = ["BM", "weights:MH", "moments:MH"]
    partitioned = Partitioned(step, partitioning, machine.compile_devices(), layouts, donate)
    weight = tf.TensorSpec((WIDTH, HIDDEN))
    program = partitioned.lower(tf.TensorSpec((ROWS, WIDTH)), weight, weight)
    return program, compilation.compile_for(program, machine)


def sizes_of(topology: str, donate=()):
    program, found = compiled(topology, donate)
    return memory.bytes_by_class(program, CLASSES, found.memory, found.module), found.memory


@pytest.mark.parametrize("donate", [(), (1, 2)])
def test_memory_classes_on_cpu(donate):
    sizes, told = sizes_of("cpu:8", donate)
    assert sizes["weights"] == sizes["moments"] == 4 * WIDTH * HIDDEN // 2
    assert sizes["inputs"] == told["arguments"] - 2 * sizes["weights"]
    assert 0 <= sizes["inputs"] - 4 * ROWS * WIDTH // 4 < 200
    assert sizes["activations"] == told["temporaries"] + told["outputs"]
    assert sizes["program"] == told["code"]
    everything = ("arguments", "outputs", "temporaries", "code")
    assert sizes["peak"] == told["peak"] == sum(told[name] for name in everything)
    # Donated inputs are not in memory twice.
    assert (told["outputs"] < 2 * sizes["weights"]) == bool(donate)


def test_memory_classes_on_tpu_include_padding():
    pytest.importorskip("libtpu")
    sizes, told = sizes_of("v3:2x2", (1, 2))
    # With tiles of 8 x 128, 24 x 20 floats take 24 x 128. Transposed, 20 x 24 take as much.
    assert sizes["weights"] == sizes["moments"] == 4 * 24 * 128
    assert sum(sizes[name] for name in CLASSES) == told["arguments"]
    assert sizes["peak"] == told["peak"]


def test_inputs_removed_by_the_compiler():
    """Without the compiler's layouts, inputs count without padding."""
    program, found = compiled("cpu:8")
    more = dataclasses.replace(program, inputs=(*program.inputs, program.inputs[0]))
    classes = (*CLASSES, memory.INPUTS)
    sizes = memory.bytes_by_class(more, classes, found.memory, found.module)
    assert sizes["weights"] == 4 * WIDTH * HIDDEN // 2


def test_largest_temporaries():
    _, found = compiled("cpu:8")
    rows = memory.largest_temporaries(found.module, None)
    sizes = [row.bytes for row in rows]
    assert sizes == sorted(sizes, reverse=True) and len(rows) <= 20
    hidden = [ROWS // 4, HIDDEN // 2]
    (row,) = [r for r in rows if r.shape == hidden and r.dtype == "float32"][:1]
    assert row.bytes == 4 * ROWS // 4 * HIDDEN // 2


def test_constants_and_views_are_not_temporaries():
    text = (
        "HloModule m\n\n"
        "ENTRY %m (a: f32[8,128]) -> f32[8,128] {\n"
        "  %a = f32[8,128]{1,0} parameter(0)\n"
        "  %c = f32[8,128]{1,0} constant({...})\n"
        "  %b = f32[1024]{0} bitcast(%a)\n"
        '  ROOT %s = f32[8,128]{1,0} add(%a, %c), metadata={op_name="encoder/layers_0/add"}\n'
        "}\n"
    )
    layers = frozenset({"encoder/layers_0"})
    assert memory.largest_temporaries(parse_module(text), layers) == [
        TemporaryRow(
            name="s", layer="encoder/layers_0", shape=[8, 128], dtype="float32", bytes=4096
        )
    ]
