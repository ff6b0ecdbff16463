# tests: wings/planning/programs/exported_function.py, wings/planning/programs/jax_program.py
"""Plans wrong jax programs: each is refused in one sentence that says what to change."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from jax.experimental import io_callback, pallas
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import lingvo_gshard
from lingvo_gshard.core.errors import UserError

MESH = AbstractMesh((4, 2), ("data", "model"))
ROWS = AbstractMesh((8,), ("rows",))


def spec(shape, *axes, dtype=jnp.float32, mesh=MESH):
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


X, W = spec((8, 16), "data"), spec((16, 4))


def prints(x, **options):
    jax.debug.print("{x}", x=x.sum(), **options)
    return x


def asks_the_host(call, x):
    return call(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def yields(x):
    yield x


async def waits(x):
    return x


def branches(x):
    return x if x.sum() > 0 else -x


def repeats(x):
    return repeats(x)


def attention(x):
    q = jnp.zeros((2, 32, 4, 64), jnp.bfloat16) + x.sum().astype(jnp.bfloat16)
    return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")


def copies(x):
    def body(source, target):
        target[...] = source[...]

    return pallas.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def mapped(in_specs):
    return lambda x: jax.shard_map(
        lambda part: part, mesh=MESH, in_specs=in_specs, out_specs=PartitionSpec()
    )(x)


class Model:
    """Is no function."""


HOST = "it calls the host, as "
RETURNS = "it returns no arrays, so that a compiler would remove all that it computes; return the"
NAMES = "shardings must name axes of the mesh that `specs` have"
WRONG = {
    "None": (lambda x: None, (X,), RETURNS),
    "nothing": (lambda x: {}, (X,), RETURNS),
    "print": (prints, (X,), HOST),
    "ordered print": (functools.partial(prints, ordered=True), (X,), HOST),
    "pure_callback": (functools.partial(asks_the_host, jax.pure_callback), (X,), HOST),
    "io_callback": (functools.partial(asks_the_host, io_callback), (X,), HOST),
    "generator": (yields, (X,), "return arrays in place of yielding them"),
    "async": (waits, (X,), "it is an async function; give a function that returns arrays"),
    "branch": (branches, (X,), "use jnp.where, jax.lax.cond or jax.lax.while_loop"),
    "shape of values": (lambda x: jnp.nonzero(x)[0], (X,), "give fixed sizes, such as `size=`"),
    "int of a value": (lambda x: jnp.zeros(int(x.sum())), (X,), "give fixed sizes"),
    "shapes": (lambda x, w: x @ w.T, (X, W), "check the shapes in `specs`"),
    "arity": (lambda x: x, (X, W), "`specs` must have one entry for each argument"),
    "text": (lambda x, n: x, (X, "name"), "bind all other arguments with functools.partial"),
    "unhashable": (
        *(jax.jit(lambda x, n: x * len(n), static_argnums=1), (X, [1, 2])),
        "bind static arguments with functools.partial, or pass tuples",
    ),
    "returned text": (lambda x: "loss", (X,), "return arrays, in tuples, lists or dictionaries"),
    "NumPy": (lambda x: np.linalg.svd(x), (X,), "to NumPy or TensorFlow; use jax.numpy, at "),
    "TensorFlow": (lambda x: tf.nn.relu(x), (X,), "to NumPy or TensorFlow; use jax.numpy"),
    "no function": (42, (X,), "give a function of jax, jitted or not"),
    "object": (Model(), (X,), "give a function of jax, jitted or not"),
    "class": (Model, (X,), "`specs` must have one entry for each argument"),
    "one spec": (lambda x: x, X, "expected a tuple or a list with one entry for each argument"),
    "no specs": (lambda x: x, None, "`specs` is a NoneType; expected a tuple or a list"),
    "specs of TensorFlow": (
        *(lambda x: jnp.tanh(x), (tf.TensorSpec((8, 16)),)),
        "is a function of jax; give its arguments as jax.ShapeDtypeStruct with shardings",
    ),
    "arrays of one device": (
        *(lambda x: jnp.tanh(x), (jnp.ones((8, 16)),)),
        "was made for 1 device, data=1, but `topology=cpu:8` has 8",
    ),
    "missing weight": (
        *(lambda p: p["weight"], ({"w": X},)),
        f"the function fails while jax traces it, at {__file__}",
    ),
    "wrong call": (
        *(lambda x: prints(), (X,)),
        f"the function fails while jax traces it, at {__file__}",
    ),
    "recursion": (repeats, (X,), "the function calls itself without end"),
    "unbound axis": (lambda x: jax.lax.psum(x, "data"), (X,), "axes of the mesh inside jax.shard"),
    "two meshes": (
        *(lambda x, y: x + y, (X, spec((8, 16), "rows", mesh=ROWS))),
        "it has several meshes, data=4,model=2 and rows=8, and a plan has one",
    ),
    "uneven": (lambda x: x, (spec((9, 16), "data"),), "sizes of axes divide the dimensions"),
    "other devices": (
        *(lambda x: x, (spec((8, 16), mesh=AbstractMesh((4,), ("rows",))),)),
        "was made for 4 devices, rows=4, but `topology=cpu:8` has 8",
    ),
    "no sharding": (
        *(lambda x: x, (jax.ShapeDtypeStruct((8, 16), "float32"),)),
        "was made for 1 device, data=1, but `topology=cpu:8` has 8",
    ),
    # XLA ends the process.
    "overflowing sizes": (lambda x: x * 2, (spec((2**40, 2**40)),), "which no machine can hold"),
    "overflowing inside": (
        *(lambda x: (jnp.zeros((2**40, 2**30)) + x[0, 0]).sum(), (X,)),
        "which no machine can hold",
    ),
    "overflowing number": (
        lambda x: x.sum() + 2**40,
        (spec((8,), dtype=jnp.int32),),
        "use smaller",
    ),
    "cuDNN": (attention, (X,), "take `implementation='xla'`, or export the step"),
    "kernel": (copies, (X,), "a kernel was written for another kind of chip"),
    "axis of a constraint": (
        *(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("rows")), (X,)),
        NAMES,
    ),
    "axis of shard_map": (mapped(PartitionSpec("rows")), (X,), NAMES),
    "rank of shard_map": (mapped(PartitionSpec(None, None, "data")), (X,), "check the shapes"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_wrong_programs_are_refused_in_a_sentence(name):
    function, specs, words = WRONG[name]
    with pytest.raises(UserError) as raised:
        lingvo_gshard.plan(function, specs, "cpu:8")
    message = str(raised.value)
    if name == "async":
        # What the function returned warns when it is freed.
        del raised
        gc.collect()
    assert words in message and "\n" not in message and len(message) < 700


def test_arguments_that_jax_narrows_are_named():
    plan = lingvo_gshard.plan(lambda x: x * 2, (spec((8, 16), "data", dtype=np.float64),), "cpu:8")
    assert plan.bytes_per_device.inputs == 4 * 8 * 16 // 4
    assert any("1 of float64" in note and "jax_enable_x64" in note for note in plan.notes)
