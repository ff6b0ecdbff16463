"""Tests which names, pages of the web and redirects the server answers to."""

import pytest
from starlette.testclient import TestClient

from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.origins import Origins
from lingvo_gshard.wings.serving.service import Service

pytestmark = pytest.mark.xdist_group("serving")

LOCAL = ("localhost:8000", "LocalHost", "127.0.0.1:8000", "[::1]:8000")
FOREIGN = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example")
NO_NAME = ("", "a b", "localhost:x", "[::1", "user@localhost", "localhost/..")


def statuses(client, hosts):
    return [client.get("/healthz", headers={"Host": host}).status_code for host in hosts]


@pytest.fixture
def serving(translating):
    """Returns a function that serves on an address and returns a client."""

    def serve(host="127.0.0.1", hosts=(), sites=(), token=""):
        app = make_app(Service(translating, token=token), Origins.of(host, hosts, sites))
        return TestClient(app, base_url="http://localhost:8000", follow_redirects=False)

    return serve


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_local_server_answers_to_local_names_only(serving, host):
    client = serving(host)
    assert statuses(client, LOCAL) == [200] * len(LOCAL)
    assert statuses(client, FOREIGN) == [421] * len(FOREIGN)
    assert statuses(client, NO_NAME) == [421] * len(NO_NAME)
    assert statuses(client, ("192.0.2.7",)) == [421]
    said = client.get("/", headers={"Host": "evil.example"}).json()["error"]
    assert said["code"] == "unknown_host" and "`allow_host=NAME`" in said["message"]


def test_an_open_server_answers_to_addresses_but_not_to_names_of_others(serving):
    client = serving("0.0.0.0", hosts=["Models.example.com"])
    known = ("192.0.2.7:8000", "[2001:db8::1]", "localhost", "models.example.com:443")
    assert statuses(client, known) == [200] * len(known)
    assert statuses(client, FOREIGN) == [421] * len(FOREIGN)
    assert statuses(serving(hosts=["*"]), FOREIGN) == [200] * len(FOREIGN)


def test_two_names_are_none(serving):
    client = serving()
    response = client.get("/healthz", headers=[("Host", "localhost"), ("Host", "evil.example")])
    assert response.status_code == 400


def test_pages_of_other_sites_may_not_post(serving):
    client, body = serving(), {"text": "", "beam_size": 1}
    for origin in ("https://evil.example", "null", "http://localhost:8001", "http://localhost"):
        response = client.post("/v1/translate", json=body, headers={"Origin": origin})
        assert response.status_code == 403, origin
        assert response.json()["error"]["code"] == "foreign_origin"
    # What a form of a page can send without asking first.
    form = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    assert client.post("/v1/translate", content=b"{}", headers=form).status_code == 403
    for headers in ({}, {"Origin": "http://localhost:8000"}):
        response = client.post("/v1/translate", json=body, headers=headers)
        assert response.status_code == 200
        assert "access-control-allow-origin" not in response.headers


def test_pages_of_an_allowed_site_may_post_after_asking(serving):
    site = "https://app.example.com"
    client = serving(sites=[site], token="secret")
    asked = {
        "Origin": site,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = client.options("/v1/translate", headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == site
    assert "Authorization" in response.headers["access-control-allow-headers"]
    response = client.post("/v1/translate", json={"text": ""}, headers={"Origin": site})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == site
    headers = {"Origin": site, "Authorization": "Bearer secret"}
    assert client.post("/v1/translate", json={"text": ""}, headers=headers).status_code == 200
    foreign = asked | {"Origin": "https://evil.example"}
    assert client.options("/v1/translate", headers=foreign).status_code == 403


def test_nothing_is_redirected(serving):
    """A redirect would be sent before the token is checked, to where the header Host says."""
    client = serving(token="secret")
    for path in ("/v1/translate/", "/v1/models/", "/healthz/"):
        response = client.get(path)
        assert response.status_code in (401, 404) and "location" not in response.headers


@pytest.mark.parametrize(
    "given, said",
    [
        ({"hosts": ["a.example:80"]}, "`allow_host=a.example:80`: a name without a port was"),
        ({"hosts": ["https://a.example"]}, "`allow_host=https://a.example`: a name"),
        ({"sites": ["app.example.com"]}, "`allow_origin=app.example.com`: a scheme and a host"),
        ({"sites": ["https://a.example/"]}, "`allow_origin=https://a.example/`: a scheme"),
    ],
)
def test_names_and_origins_that_are_none_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Origins.of("127.0.0.1", **given)
