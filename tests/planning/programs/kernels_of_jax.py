"""Steps with kernels that jax ships: splash attention, grouped products, attention of Triton."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas
from jax.experimental.pallas import triton as pallas_triton
from jax.experimental.pallas.ops.gpu import attention as triton_attention
from jax.experimental.pallas.ops.tpu.megablox import ops as megablox
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

BATCH, HEADS, LENGTH, DIM = 4, 2, 1024, 128
# Both are squares, and both attentions skip blocks above the diagonal.
BLOCK = 128
ROWS, INNER, OUTER, GROUPS = 2048, 512, 1024, 8


def spec(shape, *axes, dtype=jnp.bfloat16, mesh=(4,)):
    sharding = NamedSharding(AbstractMesh(mesh, ("data",)), PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def causal_product(block=BLOCK):
    """Returns the FLOPs of a product of a row's queries by its keys, in the blocks that count."""
    blocks = LENGTH // block
    return 2 * HEADS * (blocks * (blocks + 1) // 2) * block * block * DIM


def causal(q, k, v):
    """Returns a sum over splash attention to rows [N,L,D] of one device."""
    mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH)) for _ in range(HEADS)])
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(q, k, v)


def splash_step(q, k, v):
    """Returns gradients of splash attention, each device with its rows."""
    rows = PartitionSpec("data")
    mapped = jax.shard_map(
        causal,
        mesh=AbstractMesh((4,), ("data",)),
        in_specs=rows,
        out_specs=rows,
        check_vma=False,
    )
    return jax.grad(lambda *x: mapped(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)


def splash_specs():
    """Returns the arguments of `splash_step`."""
    return (spec((BATCH, HEADS, LENGTH, DIM), "data"),) * 3


def grouped_step(rows, weights, sizes):
    """Returns gradients of grouped products."""

    def loss(rows, weights):
        return megablox.gmm(rows, weights, sizes, jnp.float32, (128, 128, 128)).sum()

    return jax.grad(loss, (0, 1))(rows, weights)


def grouped_specs():
    """Returns the arguments of `grouped_step`, on one device."""
    shapes = (ROWS, INNER), (GROUPS, INNER, OUTER)
    factors = (spec(shape, mesh=(1,)) for shape in shapes)
    return (*factors, spec((GROUPS,), dtype=jnp.int32, mesh=(1,)))


def triton_step(q, k, v):
    """Returns causal attention to rows [B,L,N,D] by Triton."""
    blocks = triton_attention.BlockSizes(block_q=BLOCK, block_k=BLOCK)
    return triton_attention.mha(q, k, v, None, causal=True, block_sizes=blocks)


def triton_specs():
    """Returns the arguments of `triton_step`, on one device."""
    return (spec((BATCH, LENGTH, HEADS, DIM), mesh=(1,)),) * 3


def opaque_step(x):
    """Returns the result of a kernel that only its library knows."""
    call = jax.ffi.ffi_call("my_products", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x) @ x.T


def skipped_products(platform):
    """Returns a step with a product in a grid of 4 x 3 for the cells below the diagonal."""

    def body(a, b, c):
        row, column = pallas.program_id(0), pallas.program_id(1)

        @pallas.when(column <= row)
        def _():
            c[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def step(a, b):
        size = pallas.BlockSpec((128, 128), lambda i, j: (i, 0))
        other = pallas.BlockSpec((128, 128), lambda i, j: (0, j))
        result = pallas.BlockSpec((128, 128), lambda i, j: (i, j))
        options = {"compiler_params": pallas_triton.CompilerParams()} if platform == "cuda" else {}
        return pallas.pallas_call(
            body,
            grid=(4, 3),
            in_specs=[size, other],
            out_specs=result,
            out_shape=jax.ShapeDtypeStruct((512, 384), jnp.float32),
            name="skipped",
            **options,
        )(a, b)

    return step, (spec((512, 128), mesh=(1,)), spec((128, 384), mesh=(1,)))
