"""What may stand where a file was expected."""

import os
import pathlib
import socket


def _socket(path: pathlib.Path) -> None:
    # Names of sockets are short.
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _terabytes(path: pathlib.Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2**42)


def _link_to_pipe(path: pathlib.Path) -> None:
    os.mkfifo(f"{path}.pipe")
    path.symlink_to(f"{path}.pipe")


# None of these can be read.
IRREGULAR = {
    "pipe": os.mkfifo,
    "link to a pipe": _link_to_pipe,
    "socket": _socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "directory": os.mkdir,
    "link to itself": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to("/nowhere/at/all"),
}
ODD = IRREGULAR | {"terabytes": _terabytes, "empty": lambda path: path.touch()}
