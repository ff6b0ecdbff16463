"""Fixtures: emulators of both kinds of buckets, and a new folder in one of them."""

import importlib.util
import itertools
import os

import pytest

from tests.object_stores.emulators import running
from tests.tools import tiny_translation

_number = itertools.count(1)


def _emulator(scheme, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with running(scheme) as emulator:
        os.environ.update(emulator.environment)
        yield emulator
        for name in emulator.environment:
            del os.environ[name]


@pytest.fixture(scope="session")
def gcs():
    """Gives Google Cloud Storage."""
    yield from _emulator("gs", "gcp_storage_emulator")


@pytest.fixture(scope="session")
def s3():
    """Gives Amazon S3."""
    yield from _emulator("s3", "moto")


@pytest.fixture(params=["gcs", pytest.param("s3", marks=pytest.mark.slow)])
def emulator(request):
    """Gives each kind of buckets, without faults from earlier tests."""
    found = request.getfixturevalue(request.param)
    found.faults.clear()
    yield found
    found.faults.clear()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Gives flags that name a small experiment on a disk."""
    flags = tiny_translation.write(tmp_path_factory.mktemp("corpus"))
    return [*flags, "--gin_param=run.checkpoint_every_steps = 10"]


@pytest.fixture
def folder(emulator):
    """Gives the URL of a new folder in a bucket."""
    return f"{emulator.bucket}/test-{next(_number)}"
