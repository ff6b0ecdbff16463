# tests: wings/serving/bodies.py, wings/serving/endpoints/generate.py
"""Tests that a server decodes as a model was published to, unless a request says otherwise."""

import dataclasses
import json

import pytest
from starlette.testclient import TestClient

from lingvo_gshard.wings.inference.published_settings import PublishedSettings
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.bodies import parse
from lingvo_gshard.wings.serving.endpoints.generate import GenerateBody
from lingvo_gshard.wings.serving.service import Service
from tests.serving.conftest import PATIENT

DRAWN = PublishedSettings.of({"do_sample": True, "temperature": 0.5, "top_k": 4})


def fields(body):
    options = parse(json.dumps(body).encode(), GenerateBody, published=DRAWN).options()
    return options.temperature, options.top_k, options.beam_size


def test_a_body_has_the_published_fields_that_it_does_not_give():
    assert fields({}) == (0.5, 4, 1)
    assert fields({"top_k": 9, "prompt": "a"}) == (0.5, 9, 1)
    assert fields({"temperature": 0}) == (0.0, 0, 1)
    assert fields({"beam_size": 2}) == (0.0, 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "explicit"),
    [
        ("/v1/generate", {"temperature": 0, "most_tokens": 5}),
        ("/v1/completions", {"temperature": 0, "max_tokens": 5}),
    ],
)
def test_a_server_uses_the_settings(writing, path, explicit):
    def texts(model, body):
        with TestClient(make_app(Service(model, PATIENT))) as client:
            found = client.post(path, json={"prompt": "the "} | body).json()
        return [each["text"] for each in found.get("texts", found.get("choices"))]

    settings = PublishedSettings.of({"do_sample": False, "max_new_tokens": 5})
    served = dataclasses.replace(writing, published=settings)
    given = {"max_tokens": 5} if "max_tokens" in explicit else {}
    assert texts(served, given) == texts(writing, explicit)
