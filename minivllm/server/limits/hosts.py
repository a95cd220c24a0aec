"""Host names that a server answers to.

A page that a browser shows may resolve its name to this machine (DNS rebinding), and is then of the same
origin as the server, as far as the browser can tell. The Host header still carries the page's name. That name
is a public domain, so it has a dot. An address needs no lookup, a name without a dot is one of the local
network, and ``*.localhost`` always means this machine (RFC 6761, section 6.3): these are answered to.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from minivllm.server.bodies.errors import ApiError, error_response

MAX_SHOWN_CHARACTERS = 100
_LABEL = re.compile(r"[a-z0-9_-]+")


class KnownHosts:
    """Reads a target in absolute form (``GET http://host/path``, RFC 9112, section 3.2.2),
    and refuses foreign hosts.

    hosts: names with a dot that are answered to, lower case; None for any.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _read_absolute_form(scope)
            host = dict(scope["headers"]).get(b"host")
            if self._hosts is not None and host is not None:
                name = _name(host)
                if name not in self._hosts and not _is_local(name):
                    await error_response(self._unknown(name))(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _unknown(self, name: str) -> ApiError:
        names = "".join(f", {name}" for name in sorted(self._hosts or ()))
        return ApiError(
            403,
            f"This server has no host name {name[:MAX_SHOWN_CHARACTERS]!r}; it answers to localhost, "
            "addresses, names "
            f"without a dot{names}. If that name is right, start the server with --allowed-host and the "
            "name, or with "
            "--api-key.",
            type="permission_error",
            code="unknown_host",
            headers={"connection": "close"},
        )


def _read_absolute_form(scope: Scope) -> None:
    """Split ``http://host/path`` into the path and the Host header, which it overrides."""
    scheme, separator, rest = scope["raw_path"].partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return
    authority, _, path = rest.partition(b"/")
    scope["raw_path"] = b"/" + path
    scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [(b"host", authority), *others]


def _is_local(name: str) -> bool:
    """True for a name that no domain of the internet has."""
    if _LABEL.fullmatch(name) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _name(host: bytes) -> str:
    """The host without its port, lower case."""
    text = host.decode("latin-1").strip().lower()
    address, bracket, _ = text.partition("]")
    return address + bracket if bracket else text.partition(":")[0].removesuffix(".")
