"""Compiles a layer of attention, forward and backward, for devices that are not at hand.

    python -m tests.kernels.compiled_attention v5e:2x2

prints for each strategy and mask the facts of the program with kernels, and without. It is a
command because jax finds the compiler for GPUs only when it starts.
"""

import os
import sys

# jax reads it when it starts.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import msgspec
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.runtime.devices import platform_of
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.planning.machines import topologies

# Rows are the only dimension of this size.
B, L, M, N, D = 8, 1024, 512, 4, 64
STRATEGIES = ("data", "data_tensor")
# Each kind of chip with what its kernels compute. "dropped" is "packed" with dropout of weights,
# "biased" with a learned bias of distances, "segments" with a known number of segments, "windowed"
# with a window as well.
MASKS = {
    "tpu": ("causal", "packed"),
    "gpu": ("causal", "packed", "dropped", "biased", "segments", "windowed"),
}
_CALLS = ("tpu_custom_call", "__cudnn$fmhaSoftmax", "__gpu$xla.gpu.triton")


class Facts(msgspec.Struct, frozen=True):
    """What a compiled program consists of.

    Attributes:
      calls: targets of the calls of kernels, one for each call, sorted.
      scores: shapes of arrays that have two dimensions of L, or at least as many elements as all
        scores of one device.
      collectives: (kind, bytes) of each collective, sorted.
    """

    calls: tuple[str, ...]
    scores: tuple[str, ...]
    collectives: tuple[tuple[str, int], ...]


def program(
    strategy: str, devices: int, mask: str, platform: str, device_kind: str = ""
) -> Program:
    """Returns the program of an attention's output and gradients in bfloat16.

    Args:
      strategy: one of STRATEGIES.
      devices: number of devices.
      mask: one of MASKS. All are causal, and have segments but for "causal".
      platform: the platform whose kernels it uses; "" for none.
      device_kind: jax's name of the devices.
    """
    params = SelfAttention.params().set(model_dim=M, num_heads=N, is_causal=True)
    params.set(head_dim=D, dropout_rate=0.1 if mask == "dropped" else 0.0)
    params.relative_buckets = 32 if mask == "biased" else 0
    params.kernel.most_segments = 16 if mask in ("segments", "windowed") else 0
    params.window = 256 if mask == "windowed" else 0
    layer = params.instantiate(path="attention")
    specs = layer.variable_specs()

    def step(x_BLM, d_y_BLM, segments_BL, *weights):
        sources = [annotate(x_BLM, "BLM"), annotate_weights(specs.pack(weights), specs)]
        with context.scope(training=True, seed=tf.constant([1, 0])), tf.GradientTape() as tape:
            tape.watch(sources)
            prepared = layer.mask(None if mask == "causal" else segments_BL)
            y_BLM = annotate(layer.fprop(sources[1], sources[0], prepared), "BLM")
        d_x, d_theta = tape.gradient(y_BLM, sources, annotate(d_y_BLM, "BLM"))
        d_theta = annotate_weights(d_theta, specs).flatten()
        named = [(inputs[0], y_BLM), (inputs[1], annotate(d_x, "BLM"))]
        named += zip(inputs[3:], d_theta, strict=True)
        return [(array.path, tensor, array.split) for array, tensor in named]

    mesh = f"data={devices}" if strategy == "data" else f"data={devices // 2},model=2"
    partitioning = Partitioning.make(mesh, strategy).on(platform, device_kind)
    rows = partitioning.split("BLM")
    inputs = [Array(name, (B, L, M), "bfloat16", rows) for name in ("x", "d_y")]
    inputs.append(Array("segments", (B, L), "int32", partitioning.split("BL")))
    for path, spec in specs.flatten_items():
        split = partitioning.storage_split(spec.shape, partitioning.spec_split(spec))
        inputs.append(Array(path, spec.shape, spec.dtype, split))
    return lower("attention", step, inputs, partitioning)


def facts(lowered: Program, topology: topologies.Topology) -> Facts:
    """Compiles a program for the devices of a topology, and returns its facts."""
    options = dict(topology.compiler_options)
    executable = Executable(lowered, topology.compile_devices(), options)
    instructions = [
        each for found in executable.hlo_module().computations for each in found.instructions
    ]
    shapes = {array for each in instructions for array in each.shape.arrays}
    scores = {x for x in shapes if _has_scores(x, lowered.mesh.size)}
    calls = executable.collectives()
    targets = (each.proto.custom_call_target for each in instructions)
    return Facts(
        calls=tuple(sorted(target for target in targets if target.startswith(_CALLS))),
        scores=tuple(sorted({f"{x.dtype}{list(x.dimensions)}" for x in scores})),
        collectives=tuple(sorted((call.kind, call.bytes) for call in calls)),
    )


def _has_scores(shape: hlo.module.Shape, devices: int) -> bool:
    # cuDNN works in an array of bytes.
    if shape.dtype == "u8":
        return False
    return shape.dimensions.count(L) > 1 or shape.size >= B * N * L * L // devices


def main() -> None:
    """Prints {strategy/mask: [facts with kernels, facts without]} for a topology as JSON."""
    topology = topologies.get(sys.argv[1])
    devices = topology.compile_devices()
    platform = platform_of(devices[0])
    found = {
        f"{strategy}/{mask}": [
            facts(program(strategy, len(devices), mask, used, devices[0].device_kind), topology)
            for used in (platform, "")
        ]
        for strategy in STRATEGIES
        for mask in MASKS[topology.chip.kind]
    }
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
