"""What all tests share: a quiet TensorFlow, eight devices, and hypothesis without a clock."""

import functools
import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Before jax starts in whatever test is first; TensorFlow does not read them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile(
    "house", deadline=None, derandomize=True, max_examples=50, database=None
)
hypothesis.settings.load_profile("house")

_CACHED = type(functools.cache(lambda: None))


@pytest.fixture(scope="module", autouse=True)
def _nothing_outlives_its_module(request):
    """What modules cache, compiled programs above all, would fill the memory of a whole run."""
    yield
    for value in vars(request.module).values():
        if isinstance(value, _CACHED) and value.__module__ == request.module.__name__:
            value.cache_clear()
    gc.collect()
