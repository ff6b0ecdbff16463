"""Settings of all tests: compiler flags, eight virtual devices, hypothesis without a clock."""

import functools
import gc

from tests import compiler_settings

compiler_settings.set_environment()

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile(
    "house", deadline=None, derandomize=True, max_examples=50, database=None
)
hypothesis.settings.load_profile("house")

_CACHED = type(functools.cache(lambda: None))


def pytest_sessionfinish(session):
    """Prunes the cache of compiled programs, once for all worker processes."""
    if not hasattr(session.config, "workerinput"):
        compiler_settings.remove_old_programs()


@pytest.fixture(scope="module", autouse=True)
def _clear_caches_of_the_module(request):
    """Frees what a test module cached: compiled programs would fill the memory of a whole run."""
    yield
    for value in vars(request.module).values():
        if isinstance(value, _CACHED) and value.__module__ == request.module.__name__:
            value.cache_clear()
    gc.collect()
