"""Origins: which web sites may use the server, by the headers Host and Origin.

A page of any site can have a browser send requests to this machine, and can name this machine in
the site's own domain (DNS rebinding). The header Host has the name that the browser used for this
server. The header Origin has the site of the page that sent the request. Programs that are no
browser send no Origin.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import socket
import urllib.parse
from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Send

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.serving.errors import RequestError

ANY = "*"
_LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
_WILDCARDS = frozenset(("", "0.0.0.0", "::"))
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:\d{1,5})?")


@dataclasses.dataclass(frozen=True)
class Origins:
    """Who may use the server from a browser.

    Attributes:
      hosts: names of the server that requests may use, in lower case; ANY allows all names.
      takes_addresses: whether requests may use any numeric address. This is safe, since DNS
        rebinding needs a name.
      sites: origins of pages that may use the server besides the server's own pages, such as
        "https://app.example.com"; ANY allows all origins.
    """

    hosts: frozenset[str]
    takes_addresses: bool = False
    sites: tuple[str, ...] = ()

    @classmethod
    def of(cls, host: str, hosts: Sequence[str] = (), sites: Sequence[str] = ()) -> Origins:
        """Returns the rules of a server.

        Args:
          host: the name or address that the server listens on.
          sites: origins of pages that may use the server.

        Raises:
          UserError: a name is no host name, or an origin is no origin.
        """
        for name in hosts:
            if name != ANY and not (_HOST.fullmatch(name) and ":" not in name):
                raise UserError(
                    f"`allow_host={name}`: a name without a port was expected, such as "
                    "models.example.com"
                )
        for site in sites:
            place = _place(site)
            scheme = site.partition("://")[0]
            if site != ANY and not (place and scheme and site.lower() == f"{scheme}://{place}"):
                raise UserError(
                    f"`allow_origin={site}`: a scheme and a host without a path were expected, "
                    "such as https://app.example.com"
                )
        is_open = host in _WILDCARDS
        own = {host.lower(), *(name.lower() for name in hosts)} - _WILDCARDS
        if is_open:
            own |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        if is_open or own & _LOCAL_NAMES or host.startswith("127."):
            own |= _LOCAL_NAMES
        return cls(frozenset(own), is_open, tuple(sites))

    def check(self, headers: Headers) -> None:
        """Raises RequestError if a request comes by a wrong name or from a foreign page."""
        given = headers.getlist("host")
        if len(given) != 1:
            raise RequestError(400, f"the request has {len(given)} headers Host; 1 was expected")
        found = _HOST.fullmatch(given[0])
        name = found[1].strip("[]").lower() if found else ""
        if not self._knows(name):
            raise RequestError(
                421,
                f"this server is not called {given[0][:100]!r}; start it with `allow_host=NAME` to "
                "be reached by another name",
                code="unknown_host",
            )
        origin = headers.get("origin")
        if origin is None or origin in self.sites or ANY in self.sites:
            return
        if _place(origin) != given[0].lower():
            raise RequestError(
                403,
                f"pages of {origin[:100]} may not use this server; start it with `allow_origin="
                "ORIGIN` to let those of another site",
                code="foreign_origin",
            )

    def _knows(self, name: str) -> bool:
        if name in self.hosts or ANY in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.takes_addresses

    def guarding(self, app: ASGIApp) -> ASGIApp:
        """Returns an application that answers only requests that these rules let pass."""
        if self.sites:
            app = CORSMiddleware(
                app,
                allow_origins=self.sites,
                allow_methods=("GET", "POST"),
                allow_headers=("Authorization", "Content-Type"),
                expose_headers=("Retry-After",),
            )

        async def run(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            try:
                self.check(Headers(scope=scope))
            except RequestError as error:
                await error.response()(scope, receive, send)
            else:
                await app(scope, receive, send)

        return run


def _place(origin: str) -> str:
    """Returns the host and port of an origin in lower case; empty if it is none."""
    try:
        return urllib.parse.urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
