# tests: wings/serving/model.py, wings/inference/options.py
"""Tests that a request without a seed draws one, and that the answer tells it."""

import json

import pytest
from starlette.testclient import TestClient

import lingvo_gshard as gshard
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.model import ServedModel
from lingvo_gshard.wings.serving.service import Service
from tests.fine_tuning.conversations import chat_models
from tests.serving.conftest import PATIENT

pytestmark = pytest.mark.xdist_group("serving")

MESSAGES = [{"role": "user", "content": "w6 w7"}]
# A fifth of the texts ends after the first token: tests draw so many that they are not all equal.
BODIES = {
    "/v1/completions": {"prompt": "w6 w7", "max_tokens": 12, "temperature": 2.0},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 12, "temperature": 2.0},
    "/v1/generate": {"prompt": "w6 w7", "most_tokens": 12, "least_tokens": 12},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    chat_models.write(folder / "model")
    gshard.import_model(folder / "model", folder / "run", length=32)
    return gshard.load(folder / "run")


@pytest.fixture(scope="module")
def client(run):
    with TestClient(make_app(Service(ServedModel.of_run(run), PATIENT))) as opened:
        yield opened


def answered(client, path, **fields):
    """Returns (texts, seeds) of the answer to a request."""
    response = client.post(path, json=BODIES[path] | fields)
    assert response.status_code == 200, response.text
    found = response.json()
    if path == "/v1/generate":
        return [one["text"] for one in found["texts"]], [found.get("seed")]
    texts = [
        one["text"] if "text" in one else one["message"]["content"] for one in found["choices"]
    ]
    return texts, [one.get("seed") for one in found["choices"]]


@pytest.mark.parametrize("path", BODIES)
def test_requests_without_a_seed_differ_and_tell_the_seed_that_repeats_them(client, path):
    found = [answered(client, path) for _ in range(6)]
    assert len({texts[0] for texts, _ in found}) > 1
    assert len({seeds[0] for _, seeds in found}) == 6
    for texts, (seed,) in found:
        assert isinstance(seed, int) and 0 <= seed < 2**31
        assert answered(client, path, seed=seed) == (texts, [seed])


@pytest.mark.parametrize("path", BODIES)
def test_0_is_a_seed(client, path):
    first = answered(client, path, seed=0)
    assert first[1] == [0] and answered(client, path, seed=0) == first
    assert answered(client, path, seed=None)[1] != [0]


@pytest.mark.parametrize("path", BODIES)
def test_texts_of_one_request_differ(client, path):
    name = "best" if path == "/v1/generate" else "n"
    texts, seeds = answered(client, path, **{name: 8})
    assert len(set(texts)) > 1
    assert answered(client, path, **{name: 8}, seed=seeds[0])[0] == texts


@pytest.mark.parametrize("path", BODIES)
def test_searches_have_no_seed(client, path):
    fields = {"temperature": 0}
    assert answered(client, path, **fields) == answered(client, path, **fields, seed=3)
    assert answered(client, path, **fields)[1] == [None]


def test_equal_prompts_of_one_request_differ(client):
    texts, seeds = answered(client, "/v1/completions", prompt=["w6 w7"] * 8)
    assert len(set(texts)) > 1 and len(set(seeds)) == 8


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_tell_the_seed(client, path):
    response = client.post(path, json=BODIES[path] | {"stream": True, "n": 2})
    events = response.text.split("\n\n")[:-2]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    (seed,) = {choice["seed"] for choice in choices}
    texts = ["", ""]
    for choice in choices:
        texts[choice["index"]] += choice.get("text", choice.get("delta", {}).get("content", ""))
    assert answered(client, path, n=2, seed=seed) == (texts, [seed, seed])


def test_python_draws_anew_too(run):
    options = {"most_tokens": 12, "least_tokens": 12}
    texts = [run.generate(["w6 w7"], **options)[0][0] for _ in range(6)]
    assert len(set(texts)) > 3
    assert len({text for (text,) in run.generate(["w6 w7"] * 6, **options)}) > 3
    writer = run.text_generator(DecodingOptions(beam_size=1, temperature=1.0, **options))
    (one,), (other,) = (list(writer.write(["w6 w7"])) for _ in range(2))
    assert one.seed != other.seed
    assert run.generate(["w6 w7"], seed=one.seed, **options) == [one.texts]
    zero = run.generate(["w6 w7"], seed=0, **options)
    assert zero == run.generate(["w6 w7"], seed=0, **options)


def test_translations_that_are_drawn_tell_their_seed(client_of_translations, translating):
    client = client_of_translations
    body = {"text": ["ein Hund", "ein Hund"], "beam_size": 1, "temperature": 1.5, "most_tokens": 9}
    first, second = client.post("/v1/translate", json=body).json()["translations"]
    assert first["seed"] != second["seed"]
    options = DecodingOptions(beam_size=1, temperature=1.5, most_tokens=9, seed=first["seed"])
    (found,) = translating.translator.translate(["ein Hund"], options=options).best
    assert found[0].text == first["text"] and found[0].seed == first["seed"]


@pytest.fixture
def client_of_translations(translating):
    with TestClient(make_app(Service(translating, PATIENT))) as opened:
        yield opened
