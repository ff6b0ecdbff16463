"""Hostile clients: slow ones, leaving ones, and those that send what no client should.

Each is a coroutine that behaves badly once, and takes a few seconds at most. All connect to this
machine only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable

from tests.serving.soak.clients import HOST, exchange, message

_HEAD = b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\n"
_TEXTS = ["ein Hund sieht die Katze und das Haus"] * 200

Behavior = Callable[[int, random.Random], Awaitable[None]]


@contextlib.asynccontextmanager
async def _connection(port: int, sent: bytes):
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(sent)
        await writer.drain()
        yield reader, writer
    finally:
        writer.close()


async def endless_header(port: int, chance: random.Random) -> None:
    """Sends a header without an end, until the server has had enough."""
    async with _connection(port, _HEAD + b"X: ") as (_, writer):
        for _ in range(64):
            writer.write(b"x" * 2**16)
            await writer.drain()


async def endless_url(port: int, chance: random.Random) -> None:
    async with _connection(port, b"GET /" + b"x" * 2**20) as (reader, _):
        await reader.read(2**16)


async def half_open(port: int, chance: random.Random) -> None:
    """Holds connections with half a head, or half a body, for some seconds."""
    sent = chance.choice((b"", _HEAD, _HEAD + b"Content-Length: 1000\r\n\r\n{"))
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(_connection(port, sent))
        await asyncio.sleep(chance.uniform(1, 5))


async def one_byte_at_a_time(port: int, chance: random.Random) -> None:
    async with _connection(port, _HEAD) as (_, writer):
        for _ in range(50):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.1)


async def leaves_during_upload(port: int, chance: random.Random) -> None:
    async with _connection(port, _HEAD + b"Content-Length: 1000\r\n\r\n{"):
        await asyncio.sleep(chance.random())


async def leaves_before_the_answer(port: int, chance: random.Random) -> None:
    """Asks for many texts, and leaves while they are decoded."""
    body = json.dumps({"text": _TEXTS, "beam_size": 1}).encode()
    async with _connection(port, message(port, body)):
        await asyncio.sleep(chance.uniform(0, 0.5))


async def never_reads(port: int, chance: random.Random) -> None:
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with _connection(port, request * 100):
        await asyncio.sleep(chance.uniform(1, 3))


async def no_http(port: int, chance: random.Random) -> None:
    async with _connection(port, chance.randbytes(4096)) as (reader, _):
        await asyncio.wait_for(reader.read(2**16), 10)


async def foreign_page(port: int, chance: random.Random) -> None:
    """Posts as a browser does for a page of another site, or by a name of the attacker's."""
    header = chance.choice((b"Host: evil.example\r\n", b"Host: localhost\r\nOrigin: null\r\n"))
    sent = b"POST /v1/translate HTTP/1.1\r\n" + header + b"Content-Length: 2\r\n\r\n{}"
    async with _connection(port, sent) as (reader, _):
        status = (await asyncio.wait_for(reader.readline(), 10)).split()[1]
        assert status in (b"421", b"403"), status


async def odd_heads(port: int, chance: random.Random) -> None:
    """Sends heads that are parsed before anything is checked."""
    line = chance.choice(
        (
            b"Origin: http://[",
            b"Origin: http://[::1",
            b"Host: [",
            b"Authorization: Bearer \xff\xfe",
            b"Content-Length: 99999999999999999999999",
            b"Content-Length: \xb2",
            b"Cookie: \xff=\x80",
            b"Transfer-Encoding: \xff",
        )
    )
    url = chance.choice((b"/v1/translate", b"/none", b"/v1/models/%FF%00", b"//[", b"/\xff"))
    name = b"" if line.startswith(b"Host") else b"Host: localhost\r\n"
    sent = b"POST %b HTTP/1.1\r\n%bConnection: close\r\n%b\r\n\r\n" % (url, name, line)
    async with _connection(port, sent) as (reader, _):
        answer = await asyncio.wait_for(reader.read(2**16), 10)
        assert not answer or b" 4" in answer[:12], answer[:200]
        assert b"Traceback" not in answer, answer[:500]


async def odd_values(port: int, chance: random.Random) -> None:
    """Sends fields whose numbers, sizes or nesting no request needs."""
    field = chance.choice(("text", "beam_size", "seed", "timeout", "temperature", "stop", "prefix"))
    value = chance.choice(
        ("-1", "1e308", "9" * 400, "NaN", "[" * 600 + "]" * 600, '{"a":' * 600 + "1" + "}" * 600)
    )
    body = f'{{"text": "ein Hund", "timeout": 2, "{field}": {value}}}'.encode()
    status, answer = await exchange(port, message(port, body))
    assert 400 <= status < 500 or status in (200, 503, 504), (status, body[:100])
    assert b"Traceback" not in answer, answer[:500]


async def rare_options(port: int, chance: random.Random) -> None:
    """Asks for kinds of search whose programs are not compiled, and does not wait long."""
    body = {"text": "ein Hund", "beam_size": chance.randint(1, 8), "timeout": 2.0}
    if body["beam_size"] == 1:
        body |= {"temperature": 1.0}
    if chance.random() < 0.3:
        body |= {"forbidden_tokens": [7]}
    await exchange(port, message(port, json.dumps(body).encode()))


async def wrong_bodies(port: int, chance: random.Random) -> None:
    body = chance.choice(
        (b"[" * 100_000, b'{"text": 1}', b"\xff", b'{"text": "a", "stop": ' + b'["x"]}' * 9)
    )
    status, _ = await exchange(port, message(port, body))
    assert 400 <= status < 500, status


BEHAVIORS: tuple[Behavior, ...] = (
    endless_header,
    endless_url,
    half_open,
    one_byte_at_a_time,
    leaves_during_upload,
    leaves_before_the_answer,
    never_reads,
    no_http,
    foreign_page,
    odd_heads,
    odd_values,
    rare_options,
    wrong_bodies,
)
