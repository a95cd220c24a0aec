"""Which host names a server answers to.

A page that a browser shows may resolve its name to this machine (DNS rebinding), and is then of the same origin as the
server, as far as the browser can tell. The Host header still carries the page's name.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from minivllm.server.wire.errors import ApiError, error_response

MAX_SHOWN_CHARACTERS = 100


class KnownHosts:
    """Reads a target in absolute form (``GET http://host/path``, RFC 9112, section 3.2.2), and refuses other hosts.

    hosts: names and addresses, lower case, IPv6 in brackets; None for any.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _read_absolute_form(scope)
            host = dict(scope["headers"]).get(b"host")
            if self._hosts is not None and host is not None and _name(host) not in self._hosts:
                await error_response(self._unknown(_name(host)))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _unknown(self, name: str) -> ApiError:
        names = ", ".join(sorted(self._hosts or ()))
        return ApiError(
            403,
            f"This server has no host name {name[:MAX_SHOWN_CHARACTERS]!r}; it answers to {names}. If that name is "
            "right, start the server with --allowed-host and the name, or with --api-key.",
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


def _name(host: bytes) -> str:
    """The host without its port, lower case."""
    text = host.decode("latin-1").strip().lower()
    address, bracket, _ = text.partition("]")
    return address + bracket if bracket else text.partition(":")[0].removesuffix(".")
