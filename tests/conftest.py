"""Configures all tests: compiler flags, eight virtual devices, hypothesis without deadlines."""

import functools
import gc
import os
import signal

# TensorFlow and jax read these when they are imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Tests run tiny programs a few times, so they spend their time compiling. Without LLVM's
# optimizations and without the MLIR generator of fusions they take half as long. The HLO that tests
# inspect is the same, and results are equal but for rounding. Caches of compiled programs would
# save more; but XLA writes a warning of its own when it loads from them, and hides the compiler's
# warnings, both of which tests read.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

# Under nohup processes ignore SIGHUP, and so would the commands that tests start and signal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from lingvo_gshard.tools.console import spelling  # noqa: E402
from tests import selection  # noqa: E402
from tests.slow_tail import tail  # noqa: E402

hypothesis.settings.register_profile(
    "house", deadline=None, derandomize=True, max_examples=50, database=None
)
hypothesis.settings.load_profile("house")

_CACHED = type(functools.cache(lambda: None))


def pytest_addoption(parser):
    """Adds options that select tests."""
    selection.add_options(parser)


def pytest_configure(config):
    """Selects the tests that the options ask for."""
    selection.register(config)


def pytest_itemcollected(item):
    """Marks the tests that are slow by measurement, unless the tests of some files are wanted."""
    if not item.config.getoption("belongs_to") and not item.config.getoption("changed_since"):
        tail.mark(item)


class _ShowFailures:
    """Shows a test that failed at once: whoever has to stop a long run has seen it."""

    def __init__(self, terminal):
        self._terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._terminal.write_line(f"\nFAILED {report.nodeid} ({report.duration:.0f} s)")


def pytest_sessionstart(session):
    """Shows failures from the process that reports, not from those that run tests for it."""
    plugins = session.config.pluginmanager
    if not hasattr(session.config, "workerinput"):
        plugins.register(_ShowFailures(plugins.get_plugin("terminalreporter")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Has one process run all tests of a file, so that they share its caches and fixtures.

    Tests with a mark `xdist_group` choose otherwise.
    """
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.location[0]))


@pytest.fixture(scope="session", autouse=True)
def _collect_garbage_rarely():
    """Imports what leaves a million objects, and has the garbage collector run less often."""
    import jax  # noqa: F401
    import tensorflow  # noqa: F401

    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _spell_no_flags():
    """Forgets the flags of the command that an earlier test ran in this process."""
    spelling.spell_flags_of(())


@pytest.fixture(scope="module", autouse=True)
def _clear_caches_of_the_module(request):
    """Frees what a test module cached, and exempts what is left from garbage collection.

    Compiled programs would fill the memory of a whole run. TensorFlow and jax never free their
    modules, and what they have lowered. Traced graphs are full of reference cycles, so collections
    are frequent, and each one would visit these objects: a third of the time of all tests.
    """
    gc.freeze()
    yield
    cached = [
        value
        for value in vars(request.module).values()
        if isinstance(value, _CACHED)
        and value.__module__ == request.module.__name__
        and value.cache_info().currsize
    ]
    for value in cached:
        value.cache_clear()
    gc.collect()
