"""Configures all tests: compiler flags, eight virtual devices, hypothesis without deadlines."""

import functools
import gc
import os

# TensorFlow and jax read these when they are imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Tests run tiny programs a few times, so they spend their time compiling. Without LLVM's
# optimizations they take a quarter less. The HLO that tests inspect is the same, and results are
# equal but for rounding. Caches of compiled programs would save more; but XLA writes a warning of
# its own when it loads from them, and hides the compiler's warnings, both of which tests read.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile(
    "house", deadline=None, derandomize=True, max_examples=50, database=None
)
hypothesis.settings.load_profile("house")

_CACHED = type(functools.cache(lambda: None))


@pytest.fixture(scope="module", autouse=True)
def _clear_caches_of_the_module(request):
    """Clears caches after each test module. Compiled programs would exhaust the memory."""
    yield
    for value in vars(request.module).values():
        if isinstance(value, _CACHED) and value.__module__ == request.module.__name__:
            value.cache_clear()
    gc.collect()
