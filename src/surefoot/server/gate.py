"""What stands before every route: the API key, and limits on what clients may hold."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surefoot.server.refusals import (
    Refusal,
    Refused,
    too_large,
    too_many,
    too_much,
    too_slow,
    unauthorised,
)

_GUARDED = "/v1/"


@dataclass(frozen=True)
class Limits:
    """What clients may hold at once. Requests beyond it are told to come back.

    Attributes:
        requests: that are being read or answered.
        body_bytes: of the body of one request.
        total_bytes: of the bodies of all of them together.
        body_seconds: a body that has not come after so long does not come any more.
    """

    requests: int = 4096
    body_bytes: int = 8 << 20
    total_bytes: int = 512 << 20
    body_seconds: float = 30.0


LIMITS = Limits()


@dataclass
class _Load:
    """What is held now, in the terms of Limits."""

    requests: int = 0
    total_bytes: int = 0


class Gate:
    """ASGI middleware that refuses requests before anything of them is parsed."""

    def __init__(self, app: ASGIApp, api_key: str | None, limits: Limits) -> None:
        """Guard `app`; without `api_key` every caller is welcome."""
        self._app = app
        self._wanted = None if api_key is None else f"Bearer {api_key}".encode()
        self._limits = limits
        self._load = _Load()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["path"], Headers(scope=scope))
        if refusal is not None:
            await refusal.reply()(scope, receive, send)
            return
        body = _Body(receive, self._limits, self._load)
        self._load.requests += 1
        try:
            await self._app(scope, body, send)
        finally:
            self._load.requests -= 1
            self._load.total_bytes -= body.bytes

    def _refusal(self, path: str, headers: Headers) -> Refusal | None:
        """Why a request is not even read, if so."""
        limits, guarded = self._limits, path.startswith(_GUARDED)
        if guarded and not self._welcome(headers):
            return unauthorised()
        if guarded and self._load.requests >= limits.requests:
            return too_many(limits.requests)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limits.body_bytes:
            return too_large(limits.body_bytes)
        return None

    def _welcome(self, headers: Headers) -> bool:
        # The bytes as they came; a key may be more than ASCII.
        given = headers.get("authorization", "").encode("latin-1")
        return self._wanted is None or hmac.compare_digest(given, self._wanted)


class _Body:
    """Passes a body on as it comes, within the limits.

    Attributes:
        bytes: that came so far. They count until the answer is complete, since they are kept.
    """

    def __init__(self, receive: Receive, limits: Limits, load: _Load) -> None:
        self.bytes = 0
        self._receive = receive
        self._limits = limits
        self._load = load
        self._complete = False
        self._deadline = asyncio.get_running_loop().time() + limits.body_seconds

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        limits = self._limits
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise Refused(too_slow(limits.body_seconds)) from None
        size = len(message.get("body", b""))
        self.bytes += size
        self._load.total_bytes += size
        if self.bytes > limits.body_bytes:
            raise Refused(too_large(limits.body_bytes))
        if self._load.total_bytes > limits.total_bytes:
            raise Refused(too_much(limits.total_bytes))
        self._complete = not message.get("more_body", False)
        return message
