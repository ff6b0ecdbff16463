"""Serves tiny trained models in this process; one engine of each kind for all tests."""

import dataclasses

import pytest
from starlette.testclient import TestClient

from lingvo_gshard.api.run import load
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.limits import Limits
from lingvo_gshard.wings.serving.model import ServedModel
from lingvo_gshard.wings.serving.service import Service
from tests.tools.conftest import language_model_logdir, trained_logdir

# Programs are compiled while the first requests wait.
PATIENT = Limits(timeout=600.0)

__all__ = ["language_model_logdir", "trained_logdir"]


@pytest.fixture(scope="session")
def translation_run(trained_logdir):
    """Returns a run that translates."""
    return load(trained_logdir)


@pytest.fixture(scope="session")
def translating(translation_run):
    """Returns a served model that translates."""
    return ServedModel.of_run(translation_run)


@pytest.fixture(scope="session")
def writing(language_model_logdir):
    """Returns a served language model."""
    return dataclasses.replace(ServedModel.of_run(load(language_model_logdir)), name="tiny")


@pytest.fixture
def client(translating):
    """Returns a client of a server that translates."""
    with TestClient(
        make_app(Service(translating, PATIENT)), raise_server_exceptions=False
    ) as opened:
        yield opened


@pytest.fixture
def writer_client(writing):
    """Returns a client of a server with a language model."""
    with TestClient(make_app(Service(writing, PATIENT)), raise_server_exceptions=False) as opened:
        yield opened
