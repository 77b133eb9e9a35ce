"""Protection of the page: answers only its own origin, and forbids the page to load or run anything else.

Browsers let every web page send requests to this machine. Without these checks a page of another site could use the
model server behind this one (a blind request, or DNS rebinding to read the answer).
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 1 << 22
"""Maximum size of a request's body: a text of 100,000 characters in any language, and its options."""

_API = "/api/"
_OWN_SITES = ("same-origin", "none")
# lit-html makes templates from the page's own scripts by this one policy of trusted types.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types lit-html"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class OwnOriginOnly:
    """ASGI middleware that refuses requests of other origins, and adds the headers that confine the page.

    hosts: values of the header Host under which the page is reached, such as 127.0.0.1:8050.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._origins = frozenset(f"http://{host}" for host in self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with the reason for its refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers["cache-control"] = "no-store" if scope["path"].startswith(_API) else "no-cache"
            await send(message)

        refusal = self._refusal(scope["method"], scope["path"], Headers(scope=scope))
        answer = self._app if refusal is None else refusal
        await answer(scope, receive, send_confined)

    def _refusal(self, method: str, path: str, headers: Headers) -> PlainTextResponse | None:
        """Return the answer to a request that is not the page's own; None if it is."""
        if headers.get("host") not in self._hosts:
            return PlainTextResponse("this page is served to this machine only: open its printed address", 421)
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            return PlainTextResponse("requests of other origins are refused", 403)
        # Absent where no browser sent the request. Links of other sites to the page itself are harmless.
        if path.startswith(_API) and headers.get("sec-fetch-site", "none") not in _OWN_SITES:
            return PlainTextResponse("requests of other sites are refused", 403)
        if method in ("GET", "HEAD"):
            return None
        # A form of another site can send this request only with three other types.
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return PlainTextResponse("the body must be application/json", 415)
        return _refused_length(headers.get("content-length"))


def _refused_length(length: str | None) -> PlainTextResponse | None:
    """Return the answer to a body that is too large, or of unknown size."""
    if length is None or not length.isdecimal():
        return PlainTextResponse("the request needs a content-length", 411)
    if int(length) > MAX_BODY_BYTES:
        return PlainTextResponse(f"the body has {length} bytes; at most {MAX_BODY_BYTES} are read", 413)
    return None
