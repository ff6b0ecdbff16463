# tests: runtime/program/executable.py
"""Tests programs that jax caches: a runtime counts them, and they can be serialized."""

import jax
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.program import executable
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from tests import tiny


@pytest.fixture
def cache(tmp_path):
    """A cache of jax that keeps every program."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    # The folder above is new, too.
    folder = tmp_path / "programs" / "cache"
    executable.keep_in(folder)
    jax.config.update(names[1], 0.0)
    jax_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def test_a_program_that_jax_has_cached_can_be_kept(cache):
    x = np.arange(8.0, dtype=np.float32)
    jitted = jax.jit(lambda x: jax.numpy.exp(x - x.max()).cumsum())
    expected = jitted.lower(x).compile()(x)
    cached = set(cache.iterdir())
    assert cached
    # What this process remembers would be found first.
    jax.clear_caches()
    with executable.without_cache():
        compiled = jitted.lower(x).compile()
    serialized = serialize_executable.serialize(compiled)
    loaded = serialize_executable.deserialize_and_load(
        *serialized, execution_devices=jax.devices()[:1]
    )
    np.testing.assert_array_equal(loaded(x), expected)
    assert jax.config.jax_compilation_cache_dir == str(cache)
    jax.jit(lambda x: x * 3.0 + 1.0).lower(x).compile()
    assert set(cache.iterdir()) > cached


@pytest.mark.parametrize("count", [1, 2])
def test_a_runtime_tells_which_programs_were_cached(cache, count):
    """Programs for several CPUs are not: their collectives would have no order."""
    params = tiny.experiment_params()
    trainer = params.step.instantiate(params.task, params.run.steps)
    found = []
    for _ in range(2):
        runtime = SpmdRuntime(
            trainer, Partitioning.make(f"data={count}", "data"), devices_for(count)
        )
        runtime.init_state()
        found += [compilation.is_cached for compilation in runtime.compilations]
        jax.clear_caches()
    assert found == [False, count == 1]
