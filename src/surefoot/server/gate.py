"""What stands before every route: the API key, and a limit on the size of bodies."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surefoot.server.refusals import Refused, too_large, unauthorised

MAX_BODY_BYTES = 8 << 20
_KEYED = "/v1/"


class Gate:
    """ASGI middleware that refuses requests before anything of them is parsed."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        """Guard `app`; without `api_key` every caller is welcome."""
        self._app = app
        self._wanted = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if scope["path"].startswith(_KEYED) and not self._welcome(headers):
            await unauthorised().reply()(scope, receive, send)
            return
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
            await too_large(MAX_BODY_BYTES).reply()(scope, receive, send)
            return
        await self._app(scope, _Measured(receive), send)

    def _welcome(self, headers: Headers) -> bool:
        # The bytes as they came; a key may be more than ASCII.
        given = headers.get("authorization", "").encode("latin-1")
        return self._wanted is None or hmac.compare_digest(given, self._wanted)


class _Measured:
    """Passes a body on as it comes, up to the limit."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > MAX_BODY_BYTES:
            raise Refused(too_large(MAX_BODY_BYTES))
        return message
