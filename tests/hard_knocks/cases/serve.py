"""Servers that cannot start."""

import socket

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import trained, write
from tests.hard_knocks.sandbox import Sandbox

_SERVE = "gshard-serve --logdir=run "
_RUN = (trained("run", "translation"),)
_TAKEN = 47113
_held: list[socket.socket] = []


def _take_port(sandbox: Sandbox) -> None:
    """Has another server listen on a port."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", _TAKEN))
    held.listen()
    _held.append(held)


def _free_port(sandbox: Sandbox) -> None:
    _held.pop().close()


CASES = (
    Case(
        "a server without a model",
        "gshard-serve",
        error="--logdir is missing: the directory that gshard-train wrote",
    ),
    Case(
        "a server of a directory that does not exist",
        "gshard-serve --logdir=nowhere --port=0",
        error="--logdir=nowhere: there is no such directory. Train one first: ...",
    ),
    Case(
        "a server of a model that decodes nothing",
        "gshard-serve --logdir=run --port=0",
        given=(trained("run"),),
        error="TinyTask, the task of this run, decodes nothing",
    ),
    Case(
        "a port that another server has",
        _SERVE + f"--port={_TAKEN}",
        given=(*_RUN, _take_port),
        error=f"--host=127.0.0.1 --port={_TAKEN}: cannot listen there: Address already in use; "
        "--port=0 chooses a free one",
        then=(_free_port,),
    ),
    Case(
        "a port that does not exist",
        _SERVE + "--port=70000",
        given=_RUN,
        error="--port=70000: 70000 is not an integer in the range [0, 65535]",
    ),
    Case(
        "a host that is not this machine's",
        _SERVE + "--port=0 --host=192.0.2.1",
        given=_RUN,
        error="--host=192.0.2.1 --port=0: cannot listen there: Cannot assign requested address",
    ),
    Case(
        "a host that has no address",
        _SERVE + "--port=0 --host=no.such.host.invalid",
        given=_RUN,
        error="--host=no.such.host.invalid --port=0: cannot listen there: ...",
    ),
    Case(
        "a further name with a port",
        _SERVE + "--allow_host=models.example.com:443",
        given=_RUN,
        error="--allow_host=models.example.com:443: a name without a port was expected, such as "
        "models.example.com",
    ),
    Case(
        "a site without a scheme",
        _SERVE + "--allow_origin=https://a.example,app.example.com",
        given=_RUN,
        error="--allow_origin=app.example.com: a scheme and a host without a path were expected, "
        "such as https://app.example.com",
    ),
    Case(
        "a file of a token that is missing",
        _SERVE + "--token_file=token.txt",
        given=_RUN,
        error="--token_file=token.txt cannot be read: No such file or directory",
    ),
    Case(
        "a file of a token that is empty",
        _SERVE + "--token_file=token.txt",
        given=(*_RUN, write("token.txt", "\n")),
        error="--token_file=token.txt: one token of printable ASCII characters without spaces was "
        "expected",
    ),
    Case(
        "a file of the port that cannot be written",
        _SERVE + "--port_file=/dev/null/port",
        given=_RUN,
        error="--port_file=/dev/null/port cannot be written: ...",
    ),
    Case(
        "a queue without room",
        _SERVE + "--queue_size=0",
        given=_RUN,
        error="--queue_size=0: 0 is not a positive integer",
    ),
)
