"""Server-sent events, and noticing that a client has left."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
WRITE_SECONDS = 30.0
"""A client that does not take an event for this long has left."""


def event(content: Mapping[str, object]) -> bytes:
    """One event. It keeps to ASCII, so that no reader takes a character for the end of a line."""
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode("ascii")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client leaves first, and then `work` is cancelled."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """A reply of events that ends when the client leaves, however long the next event takes."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        """Send `events`; `close` is called in the end, whatever the end is."""
        self._events = events
        self._close = close
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        try:
            await unless_gone(receive, self._send(send))
        except TimeoutError:
            log.warning("a client took nothing for %g s and was left", WRITE_SECONDS)
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for piece in self._events:
            async with asyncio.timeout(WRITE_SECONDS):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
